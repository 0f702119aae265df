"""Request parameters: kinds of fields, and their checks."""
