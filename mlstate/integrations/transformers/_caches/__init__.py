"""Caches of transformers as `CacheState`, and back."""
