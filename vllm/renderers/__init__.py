"""Chat templates, under upstream's present paths."""
