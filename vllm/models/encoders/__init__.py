"""Encoders, whose requests are pooled and not sampled."""
