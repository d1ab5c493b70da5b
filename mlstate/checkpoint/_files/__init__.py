"""Files of other formats, and their conversion."""
