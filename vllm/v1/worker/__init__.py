"""What a rank does in a step."""
