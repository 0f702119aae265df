"""How weights are loaded, and names of upstream's."""
