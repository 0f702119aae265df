"""Types of what events of the prefix cache hold."""

from __future__ import annotations

BlockHash = bytes
ExternalBlockHash = bytes | int
"""A block's hash as other processes see it."""
