"""What the engine has done, counted, and shown to whoever watches it."""
