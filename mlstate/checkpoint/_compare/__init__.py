"""Comparing states: entries of any two, the digests of tensors, paths side by side."""
