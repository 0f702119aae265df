"""Parsers of models' own formats: upstream's path."""
