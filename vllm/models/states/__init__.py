"""Layers with a recurrent state in place of attention, a file a kind."""
