"""torch tensors as arrays, KV caches and pickles."""
