"""Packed weights that are kept on disk: `folder` has the entries, `file` is one of them."""
