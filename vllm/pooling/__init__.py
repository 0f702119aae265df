"""Texts and pairs of texts to the requests of pooling models, and outputs to scores."""
