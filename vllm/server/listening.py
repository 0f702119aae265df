"""The socket that a server listens on. Has only light imports: an address in use is an error before anything slow."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat


def bind(host: str, port: int, uds: str | None = None) -> socket.socket:
    """A bound socket that does not listen yet: connections are refused until the server is ready. Raises OSError, which
    names the address, if there is none such or it is in use. `uds`: path of a Unix socket, instead."""
    if uds is not None:
        return _bind_path(uds)
    problem = f"--host {host} --port {port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OSError(f"{problem}: {getattr(error, 'strerror', None) or error}") from None
    # Names such as localhost have IPv4 and IPv6 addresses; every client tries IPv4.
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        # Ignores lingering connections of an earlier server, not one that still listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"{problem}: {error.strerror or error}") from None
    return listener


def _bind_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Left behind by a server that has ended: no process listens on it.
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                other.connect(path)
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise OSError(f"--uds {path}: {error.strerror or error}") from None
    return listener
