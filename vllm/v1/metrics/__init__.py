"""Counts and distributions of what the engine has done, and their rendering for Prometheus."""
