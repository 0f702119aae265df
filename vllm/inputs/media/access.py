"""Permissions of a server to read for its clients: hosts by name, private addresses by network, one folder."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from vllm.exceptions import VLLMValidationError, shown

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_BYTES = 2**25
"""The longest file that is fetched or read."""
# Addresses of IPv6 that are IPv4's behind a translator.
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True)
class MediaAccess:
    """
    Attributes:
        domains: hosts from which pictures are fetched, in lower case.
        networks: private ones that these may be in.
        folder: files below it are read, resolved; None: no file is.
    """

    domains: frozenset[str] = frozenset()
    networks: tuple[_Network, ...] = ()
    folder: Path | None = None

    @classmethod
    def of(cls, allowed_domains: Any, allowed_path: Any) -> MediaAccess:
        """
        Args:
            allowed_domains: hosts, and addresses or networks such as 10.0.0.0/8 that may be private; None: none.
            allowed_path: a folder; empty or None: none.

        Raises:
            ValueError: an entry is neither, or there is no such folder.
        """
        domains: set[str] = set()
        networks: list[_Network] = []
        if isinstance(allowed_domains, str) or not isinstance(allowed_domains, Iterable | None):
            raise ValueError(f"allowed_media_domains must be a list of hosts, got {shown(allowed_domains)}")
        for entry in allowed_domains or ():
            if not isinstance(entry, str) or not entry.strip() or any(mark in entry for mark in "@?#*\\ "):
                example = "such as example.com or 10.0.0.0/8"
                raise ValueError(f"allowed_media_domains has hosts {example}, got {shown(entry)}")
            text = entry.strip().lower().strip("[]")
            try:
                networks.append(ipaddress.ip_network(text))
            except ValueError:
                if "/" in text or ":" in text:
                    message = f"allowed_media_domains has hosts, without scheme, port or path; got {shown(entry)}"
                    raise ValueError(message) from None
            domains.add(_host(text))
        return cls(frozenset(domains), tuple(networks), _folder(allowed_path))

    def check_host(self, name: str, host: str) -> str:
        """The host as names are looked up. Raises VLLMValidationError unless pictures may be fetched from it."""
        if _host(host) not in self.domains:
            message = f"{name}: this engine fetches nothing from {shown(host)}; --allowed-media-domains names hosts"
            raise VLLMValidationError(message, name)
        return _host(host)

    def allowed(self, addresses: Sequence[str]) -> list[str]:
        """The addresses that are public, or in one of the networks."""
        return [each for each in addresses if self._is_allowed(each)]

    def _is_allowed(self, text: str) -> bool:
        try:
            address = _plain(ipaddress.ip_address(text.partition("%")[0]))
        except ValueError:
            return False
        if any(address in network for network in self.networks):
            return True
        return address.is_global and not (address.is_multicast or address.is_reserved)

    def read(self, name: str, url: str) -> bytes:
        """The file of a file: URL. The error is one for what is outside, missing or unreadable.

        Raises:
            VLLMValidationError: no file below the folder, or a longer one than MAX_BYTES.
        """
        problem = f"{name} is no file below the server's --allowed-local-media-path"
        if self.folder is None:
            message = f"{name}: this engine reads no files; --allowed-local-media-path names a folder"
            raise VLLMValidationError(message, name)
        try:
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost"):
                raise VLLMValidationError(f"{problem}: a file URL has no host", name)
            path = Path(os.path.realpath(url2pathname(parts.path), strict=True))
            if not path.is_relative_to(self.folder):
                raise VLLMValidationError(problem, name)
            data = _contents(path, MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            if isinstance(error, VLLMValidationError):
                raise
            raise VLLMValidationError(problem, name) from None
        if len(data) > MAX_BYTES:
            raise VLLMValidationError(f"{name} is a file of more than {MAX_BYTES} bytes", name)
        return data


def _contents(path: Path, most: int) -> bytes:
    """At most so many bytes; OSError where it is no regular file, which may have been put there since."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("no regular file")
        return file.read(most)


def _plain(address: _Address) -> _Address:
    """The address of IPv4 that one of IPv6 stands for, if it does."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _TRANSLATED:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def _host(text: str) -> str:
    return text.lower().rstrip(".")


def _folder(path: Any) -> Path | None:
    if path is None or path == "":
        return None
    if not isinstance(path, (str, Path)):
        raise ValueError(f"allowed_local_media_path must be a folder, got {shown(path)}")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"allowed_local_media_path must be a folder that exists, got {str(path)!r}")
    return folder.resolve()
