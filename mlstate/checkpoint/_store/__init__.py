"""The folder of a checkpoint: manifest, indexes, lock and garbage collection."""
