"""Plans and placements of a user's model: the results of ``coterie plan`` and ``coterie place``."""
