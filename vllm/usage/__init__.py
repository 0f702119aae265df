"""Who uses the engine. Nothing is told to anyone."""
