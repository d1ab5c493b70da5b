"""Units of a state that move between device, main memory and files."""
