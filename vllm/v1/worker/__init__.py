"""A rank: its model, its KV cache, its sampling."""
