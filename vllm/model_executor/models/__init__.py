"""One architecture a file; `registry` finds the class by the config's architecture name."""
