"""Endpoints that read the logprobs of labels."""
