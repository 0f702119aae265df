"""Recurrent states of requests, and their snapshots for the prefix cache."""
