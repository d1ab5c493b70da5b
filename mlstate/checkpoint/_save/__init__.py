"""How a checkpoint is saved: arguments, shards of a rank, commit, saves in the background."""
