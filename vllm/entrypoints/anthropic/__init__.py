"""Anthropic's API: it is not served."""
