"""Pictures over HTTP: from allowed hosts alone, at addresses that were looked at, within a time and a size."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.inputs.media.access import MAX_BYTES, MediaAccess

_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
# Looking names up blocks a thread, however long it takes; other work has threads of its own.
_RESOLVERS = ThreadPoolExecutor(8, "media-resolver")


async def fetched(name: str, url: str, access: MediaAccess, kind: str = "image") -> bytes:
    """The bytes at an http: or https: URL.

    Args:
        name: the request's field, in errors.
        kind: "image" or "video".

    Raises:
        VLLMValidationError: a host or an address that is not allowed, no answer within VLLM_IMAGE_FETCH_TIMEOUT (of
            videos VLLM_VIDEO_FETCH_TIMEOUT), an answer that is no file, or one of more than MAX_BYTES.
    """
    seconds = envs.video_fetch_seconds() if kind == "video" else envs.image_fetch_seconds()
    try:
        return await asyncio.wait_for(_follow(name, url, access, kind), seconds)
    except asyncio.TimeoutError:
        message = f"{name} was not fetched within {seconds:g} s (VLLM_{kind.upper()}_FETCH_TIMEOUT)"
        raise VLLMValidationError(message, name) from None


async def _follow(name: str, url: str, access: MediaAccess, kind: str) -> bytes:
    async with httpcore.AsyncConnectionPool(
        network_backend=_CheckedAddresses(name, access), ssl_context=_ssl_context(), max_connections=1
    ) as pool:
        for _ in range(_MAX_REDIRECTS + 1):
            host, parts = _checked(name, url, access)
            try:
                found = await _answer(name, pool, host, parts, kind)
            except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError, ssl.SSLError):
                raise VLLMValidationError(f"{name} could not be fetched from {host}", name) from None
            if isinstance(found, bytes):
                return found
            if not envs.follows_media_redirects():
                message = f"{name}: {host} redirects, and VLLM_MEDIA_URL_ALLOW_REDIRECTS=0 follows nothing"
                raise VLLMValidationError(message, name)
            url = urljoin(url, found)
    raise VLLMValidationError(f"{name} was redirected more than {_MAX_REDIRECTS} times", name)


def _checked(name: str, url: str, access: MediaAccess) -> tuple[str, SplitResult]:
    """The URL's host, which is an allowed one, and its parts."""
    wrong = VLLMValidationError(f"{name} is no http or https URL of a host and a path", name)
    # Such letters mean different hosts to different parsers.
    if not url.isascii() or any(letter <= " " or letter in "\\\x7f" for letter in url):
        raise wrong
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname or port == 0:
        raise wrong
    if "@" in parts.netloc:
        raise VLLMValidationError(f"{name} is a URL with a user's name or password, which are not sent", name)
    return access.check_host(name, parts.hostname), parts


async def _answer(
    name: str, pool: httpcore.AsyncConnectionPool, host: str, parts: SplitResult, kind: str
) -> bytes | str:
    """The file, or where it is instead."""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    url = httpcore.URL(scheme=parts.scheme, host=host, port=parts.port, target=target)
    authority = f"[{host}]" if ":" in host else host
    headers: dict[bytes | str, bytes | str] = {
        "Host": authority if parts.port is None else f"{authority}:{parts.port}",
        "Accept": f"{kind}/*",
        "Accept-Encoding": "identity",
        "User-Agent": "vllm",
    }
    async with pool.stream("GET", url, headers=headers) as response:
        fields = {key.lower(): value for key, value in response.headers}
        if response.status in _REDIRECTS and b"location" in fields:
            return fields[b"location"].decode("latin-1")
        if response.status != 200:
            raise VLLMValidationError(f"{name}: {host} answered with status {response.status}", name)
        if fields.get(b"content-encoding", b"identity").lower() != b"identity":
            raise VLLMValidationError(f"{name}: {host} sent a compressed answer", name)
        too_long = VLLMValidationError(f"{name} is a file of more than {MAX_BYTES} bytes", name)
        length = fields.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BYTES:
            raise too_long
        data = bytearray()
        async for piece in response.aiter_stream():
            data += piece
            if len(data) > MAX_BYTES:
                raise too_long
        return bytes(data)


class _CheckedAddresses(httpcore.AsyncNetworkBackend):
    """Connects to the addresses that it has looked at: a name may mean others a moment later."""

    def __init__(self, name: str, access: MediaAccess) -> None:
        self._name, self._access, self._inner = name, access, httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, _addresses, host, port)
        allowed = self._access.allowed(found)
        if found and not allowed:
            message = f"{self._name}: {host} has no public address; --allowed-media-domains may name its network"
            raise VLLMValidationError(message, self._name)
        problem: Exception = httpcore.ConnectError()
        for address in allowed:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                problem = error
        raise problem


def _addresses(host: str, port: int) -> list[str]:
    """Without an address where the host is not known."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@lru_cache(maxsize=1)
def _ssl_context() -> ssl.SSLContext:
    return httpcore.default_ssl_context()
