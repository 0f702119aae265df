"""Formats of quantised checkpoints, one a file."""
