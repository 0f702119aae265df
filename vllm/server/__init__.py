"""The server: bodies in, the engine's outputs as JSON out."""
