"""Pooling models: none is served yet."""
