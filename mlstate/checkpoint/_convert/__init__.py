"""`mlstate convert`: formats by name, targets, and what is written to them."""
