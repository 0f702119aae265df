"""Prompts whose keys and values are not finite, although no logits say so yet: later requests do not find them."""
