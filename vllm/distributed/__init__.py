"""Groups of ranks and the collectives between them."""
