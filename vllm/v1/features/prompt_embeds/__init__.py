"""Prompts that have embeddings in place of tokens."""
