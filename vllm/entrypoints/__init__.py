"""The ways in: Python, the command line."""
