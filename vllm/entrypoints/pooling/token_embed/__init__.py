"""Vectors of tokens, and of parts of a text."""
