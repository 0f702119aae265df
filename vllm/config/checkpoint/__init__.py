"""The configuration that a checkpoint's files give."""
