"""How a checkpoint is loaded: arguments, targets, a loader of sections; plans of loads."""
