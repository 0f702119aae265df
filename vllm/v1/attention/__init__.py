"""Attention over the paged KV cache: what a step tells the layers, and the backends that compute it."""
