"""Jump-forward: tokens that a grammar leaves no choice about are appended together, without being drawn."""
