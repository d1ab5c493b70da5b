"""Quantized weights of Hugging Face folders, and their values."""
