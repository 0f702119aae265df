"""Connectors between caches."""
