"""Which worker holds which prefix: a directory fed by the KV events of the engines."""

from coterie.kvindex.directory import DirectoryCounts, HeldBlocks, KVDirectory
from coterie.kvindex.follower import Follower, Replay

__all__ = ["DirectoryCounts", "Follower", "HeldBlocks", "KVDirectory", "Replay"]
