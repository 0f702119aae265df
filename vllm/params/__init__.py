"""What the classes of parameters are made of."""
