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


def sha256_cbor(input: Any) -> bytes:
    """SHA-256 of the value in canonical CBOR, 32 bytes. Needs the package cbor2."""
    import cbor2

    return hashlib.sha256(cbor2.dumps(input, canonical=True)).digest()


def xxhash(input: Any) -> bytes:
    """XXH3 of the pickled value, 16 bytes. Needs the package xxhash."""
    import xxhash as library

    digest: bytes = library.xxh3_128_digest(pickle.dumps(input, protocol=pickle.HIGHEST_PROTOCOL))
    return digest


def xxhash_cbor(input: Any) -> bytes:
    """XXH3 of the value in canonical CBOR, 16 bytes. Needs the packages cbor2 and xxhash."""
    import cbor2
    import xxhash as library

    digest: bytes = library.xxh3_128_digest(cbor2.dumps(input, canonical=True))
    return digest
