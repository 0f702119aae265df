"""Layers that the models share; each holds its rank's share of the weights."""
