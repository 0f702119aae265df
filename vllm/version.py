"""The version of this package: the upstream release whose interface it follows, then our count."""

__version__ = "0.33.0+logprobs.2"
__version_tuple__ = (0, 33, 0, "logprobs.2")
