"""The folder of a checkpoint: one interface, and a class for each kind of store."""
