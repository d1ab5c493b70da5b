"""Frameworks that mlstate works with; each package imports its own inside functions."""
