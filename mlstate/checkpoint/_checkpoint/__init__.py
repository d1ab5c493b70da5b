"""The class `Checkpoint`, and functions that return one."""
