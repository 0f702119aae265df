"""Layers that the models share. Each runs on one rank; the names say how its weight would be split over several."""
