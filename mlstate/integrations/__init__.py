"""Frameworks that mlstate works with; each module imports its own inside itself."""
