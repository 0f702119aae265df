"""Readings as JSON."""
