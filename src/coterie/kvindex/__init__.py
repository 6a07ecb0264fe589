"""Directory of the prefixes that each worker holds, built from the engines' KV events."""

from coterie.kvindex.directory import DirectoryCounts, HeldBlocks, KVDirectory
from coterie.kvindex.follower import Follower, Replay

__all__ = ["DirectoryCounts", "Follower", "HeldBlocks", "KVDirectory", "Replay"]
