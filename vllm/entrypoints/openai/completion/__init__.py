"""Completions, under upstream's path."""
