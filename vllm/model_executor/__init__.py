"""Models, the layers they are made of, and how their weights are loaded."""
