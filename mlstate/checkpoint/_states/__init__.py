"""Named states of a checkpoint: the arguments ``states=`` of saves and loads."""
