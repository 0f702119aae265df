"""Helpers of endpoints that callers write themselves."""
