"""The web server around the endpoints."""
