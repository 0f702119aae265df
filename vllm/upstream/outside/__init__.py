"""Models and loaders that were written for upstream: its layers, made of ours, and what runs such a model here."""
