"""The version of this package."""

__version__ = "0.1.0"
__version_tuple__ = tuple(int(part) for part in __version__.partition("+")[0].split("."))
"""Its numbers, without what stands after a plus sign."""
