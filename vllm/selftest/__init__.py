"""Checks on the model at hand of what the engine promises."""
