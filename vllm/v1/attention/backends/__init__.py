"""Backends of attention, by upstream's names."""
