"""Tokenizers of checkpoints: their files, one class over them, and how texts are cut."""
