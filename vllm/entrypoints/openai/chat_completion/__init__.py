"""Chat completions, under upstream's path."""
