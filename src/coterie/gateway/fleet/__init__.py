"""The workers of a live fleet: who runs what, who may be chosen, who waits. Nothing here knows of HTTP."""
