"""Several requests for one result."""
