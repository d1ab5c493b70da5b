"""Layouts: which part of a tensor each rank holds."""
