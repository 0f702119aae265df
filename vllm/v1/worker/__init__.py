"""What runs a model step by step."""
