"""What all endpoints share, under upstream's path."""
