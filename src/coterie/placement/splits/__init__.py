"""How replicas of an expert share its tokens."""
