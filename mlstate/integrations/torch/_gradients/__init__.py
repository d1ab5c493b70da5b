"""Gradients of torch: hooks, reductions, DDP and FSDP2."""
