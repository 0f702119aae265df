"""What all servers share, under upstream's path."""
