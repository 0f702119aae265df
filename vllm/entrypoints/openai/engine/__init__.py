"""What all endpoints share, under upstream's older path."""
