"""Adapters for other frameworks; each subpackage imports its framework inside functions."""
