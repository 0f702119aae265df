"""What upstream's entry points have in common: the command line of a server."""
