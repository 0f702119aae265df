"""Bodies of requests."""
