"""Move units of a state between device, main memory and files."""
