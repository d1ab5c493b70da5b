"""What `load`, `verify`, `inspect`, `convert`, `reshard` and `diff` read: one `Source` per path."""
