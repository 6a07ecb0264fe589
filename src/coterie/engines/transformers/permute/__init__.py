"""Model scheduling: renumber the experts to match a placement, in a checkpoint.

The experts of a layer and everything indexed by them (router rows, router biases, score corrections) are permuted
together, so that the model computes the same function with another numbering: expert s of the new model is expert
``slot_experts[layer, s]`` of the old one. Any engine that gives rank r the r-th block of experts then has the
placement, without a patch. docs/model-scheduling.md lists what is bit-equal and what is equal within rounding.
"""

from coterie.engines.transformers.permute.checkpoint import RECORD, PermutedCheckpoint, permute_checkpoint
from coterie.engines.transformers.permute.tensors import keep_groups, routing_groups

__all__ = ["RECORD", "PermutedCheckpoint", "keep_groups", "permute_checkpoint", "routing_groups"]
