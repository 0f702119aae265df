"""New certificates for a server that runs: they expire sooner than it does."""

from __future__ import annotations

import asyncio
import os
import ssl

import uvicorn

from vllm.logger import init_logger

logger = init_logger(__name__)

_SECONDS_BETWEEN_LOOKS = 1.0

Stamp = tuple[int, int, int] | None


async def refresh_certificates(config: uvicorn.Config) -> None:
    """Read the key, the certificate and the certificates of clients' authorities anew when one of their files changes;
    never ends. Open connections keep theirs. What cannot be used is logged, and the former ones stay in use.

    Args:
        config: of the server, loaded.
    """
    paths = [os.fspath(path) for path in (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs) if path]
    seen = [_stamp(path) for path in paths]
    while True:
        await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        found = [_stamp(path) for path in paths]
        # A file that is not there is being replaced.
        if found == seen or None in found:
            continue
        seen = found
        try:
            # A key that does not fit the certificate leaves a context without either.
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config)
            assert config.ssl is not None
            _load(config.ssl, config)
        except (ssl.SSLError, OSError) as error:
            logger.error("the new certificates cannot be used: %s", error)
        else:
            logger.info("certificates were read anew: %s", ", ".join(paths))


def _load(context: ssl.SSLContext, config: uvicorn.Config) -> None:
    assert config.ssl_certfile is not None
    # Any password, even a wrong one, keeps OpenSSL from prompting.
    password = config.ssl_keyfile_password or ""
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
    if config.ssl_ca_certs:
        context.load_verify_locations(config.ssl_ca_certs)


def _stamp(path: str) -> Stamp:
    """A stamp that changes with the file's content; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
