"""`mlstate convert`: formats by name, targets, and writers."""
