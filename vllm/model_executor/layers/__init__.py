"""Layers that the models share, on one rank; their names say how weights would be split over several."""
