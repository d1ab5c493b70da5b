"""Pages and tables of checkpoints, as notebooks and plots show them."""
