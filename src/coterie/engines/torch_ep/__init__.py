"""An expert-parallel MoE layer on torch.distributed: dispatch, combine, shuffled collectives, live migration."""
