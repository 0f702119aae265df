"""The worker, which runs a model step by step."""
