"""Deltas in the formats of other programs, as arrays and metadata; see docs/follow_format.md."""
