"""Requests to the servers of conftest.py."""

MODEL = "smollm2"
API_KEY = "the-key"
