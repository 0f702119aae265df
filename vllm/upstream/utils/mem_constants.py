"""Bytes in larger units."""

KB_bytes, MB_bytes, GB_bytes = 10**3, 10**6, 10**9
KiB_bytes, MiB_bytes, GiB_bytes = 2**10, 2**20, 2**30
