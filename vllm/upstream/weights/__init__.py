"""Weights that a trainer sends to engines."""
