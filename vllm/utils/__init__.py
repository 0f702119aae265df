"""Helpers without dependence on the engine."""
