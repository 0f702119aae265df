"""Endpoints that generate text."""
