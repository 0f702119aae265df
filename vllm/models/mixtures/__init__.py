"""Mixtures of experts, a family a file: a description and the names of its checkpoints."""
