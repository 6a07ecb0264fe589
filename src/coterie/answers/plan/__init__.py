"""Plans and placements of a user's model: what coterie plan and coterie place print."""
