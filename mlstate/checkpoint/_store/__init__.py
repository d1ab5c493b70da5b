"""The files of a checkpoint: manifest, indexes, and files that no manifest needs."""
