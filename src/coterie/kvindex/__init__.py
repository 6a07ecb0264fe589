"""Directory of the prefixes that each worker holds, built from the engines' KV events."""

from coterie.kvindex.directory import MAX_BLOCKS, DirectoryCounts, KVDirectory
from coterie.kvindex.follower import Follower, Replay

__all__ = ["MAX_BLOCKS", "DirectoryCounts", "Follower", "KVDirectory", "Replay"]
