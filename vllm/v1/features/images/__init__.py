"""Prompts with pictures."""
