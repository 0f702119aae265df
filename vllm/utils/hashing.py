"""Hashes of values."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any


def sha256(input: Any) -> bytes:
    """SHA-256 of the pickled value, 32 bytes."""
    return hashlib.sha256(pickle.dumps(input, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def get_hash_fn_by_name(hash_fn_name: str) -> Callable[[Any], bytes]:
    """
    Raises:
        ValueError: it is not sha256.
    """
    if hash_fn_name != "sha256":
        raise ValueError(f"the hash must be sha256, got {hash_fn_name!r}")
    return sha256


def safe_hash(data: bytes, usedforsecurity: bool = True) -> Any:
    """hashlib's object: MD5 where the system allows it, else SHA-256."""
    try:
        return hashlib.md5(data, usedforsecurity=usedforsecurity)
    except ValueError:
        return hashlib.sha256(data)
