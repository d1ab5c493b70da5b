"""A small character model, its Core ML packages, and the story that ``mlstate demo`` tells."""
