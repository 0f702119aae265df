"""Tokenizers of checkpoints."""
