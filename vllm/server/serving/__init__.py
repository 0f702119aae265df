"""Endpoints: a body, a call of the engine, and a rendering."""
