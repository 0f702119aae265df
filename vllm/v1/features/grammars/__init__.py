"""Requests with grammars, which are compiled beside the steps."""
