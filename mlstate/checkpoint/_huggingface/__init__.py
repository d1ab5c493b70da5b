"""Write folders of Hugging Face models."""
