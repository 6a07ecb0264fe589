"""torch and torch.distributed, or None without torch: modules that use them can still be imported."""

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = dist = None

__all__ = ["dist", "torch"]
