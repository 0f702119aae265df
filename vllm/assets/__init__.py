"""Upstream's examples of media, which it downloads."""
