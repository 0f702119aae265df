"""Attention, by upstream's names."""
