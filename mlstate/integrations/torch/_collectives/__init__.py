"""Process groups over torch.distributed."""
