"""Tokens drafted ahead: none are."""
