"""Blocks of torch modules that run by a plan or a strategy."""
