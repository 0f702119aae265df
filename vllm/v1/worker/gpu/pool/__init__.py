"""Models whose requests are not sampled."""
