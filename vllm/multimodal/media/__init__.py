"""Files of media: none is read."""
