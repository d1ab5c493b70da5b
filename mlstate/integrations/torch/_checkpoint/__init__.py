"""States of torch modules and optimizers, and their files."""
