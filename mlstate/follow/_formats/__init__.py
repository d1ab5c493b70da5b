"""Deltas in the formats of other programs, as arrays and metadata; docs/follow.md has the bytes."""
