"""TLS of a live server: clients with certificates, ciphers, certificates that are replaced."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer
from tiny_llm import make_tiny_model

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")

CIPHER, OTHER_CIPHER = "ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384"
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With an authority (ca.pem), certificates that it signed for the server (twice) and a client, and one of a
    stranger; NAME.pem and NAME.key."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "stranger"):
        own = ("-subj", f"/CN={name}", "-days", "2", "-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl("req", "-x509", *KEY, *own)
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "next", "client"):
        openssl("req", *KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", "request")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san")
        openssl("x509", "-req", "-in", "request", *signed, "-out", f"{name}.pem")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def start(model: Path, folder: Path, *flags: str) -> LiveServer:
    """A server that asks clients for certificates, ready."""
    for name in ("pem", "key"):
        shutil.copy(folder / f"server.{name}", folder / f"live.{name}")
    files = {"--ssl-certfile": "live.pem", "--ssl-keyfile": "live.key", "--ssl-ca-certs": "ca.pem"}
    tls = [part for flag, name in files.items() for part in (flag, str(folder / name))]
    server = LiveServer(model, *tls, *flags, wait=False)
    wait_for(lambda: "ready: " in server.log() or server.process.poll() is not None)
    assert server.process.poll() is None, server.log()
    server.url = next(word for word in server.log().split() if word.startswith("https://")).strip(",/")
    return server


def wait_for(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(model, folder) -> Iterator[LiveServer]:
    """Clients need a certificate; of TLS 1.2 there is one cipher; certificates are read anew."""
    with start(model, folder, "--ssl-cert-reqs", "2", "--ssl-ciphers", CIPHER, "--enable-ssl-refresh") as server:
        yield server


def context(folder: Path, name: str | None) -> ssl.SSLContext:
    found = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if name is not None:
        found.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return found


def status(server: LiveServer, folder: Path, name: str | None) -> int:
    """The status of an answer to a client with the certificate `name`."""
    with httpx.Client(verify=context(folder, name), timeout=30) as client:
        return client.get(f"{server.url}/health").status_code


def handshake(server: LiveServer, tls: ssl.SSLContext) -> tuple[str, bytes]:
    """The cipher, and the server's certificate, of a connection."""
    port = int(server.url.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        tls.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        cipher, certificate = connection.cipher(), connection.getpeercert(binary_form=True)
        assert cipher is not None and certificate is not None
        return cipher[0], certificate


def test_clients_need_a_certificate_of_the_authority(server, folder):
    assert status(server, folder, "client") == 200
    for name in (None, "stranger"):
        with pytest.raises(httpx.TransportError):
            status(server, folder, name)
    assert status(server, folder, "client") == 200


def test_the_ciphers_are_those_that_were_given(server, folder):
    tls = context(folder, "client")
    tls.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(server, tls)[0] == CIPHER
    tls.set_ciphers(OTHER_CIPHER)
    with pytest.raises(ssl.SSLError):
        handshake(server, tls)


def test_new_certificates_are_used_without_a_restart(server, folder):
    def der(name: str) -> bytes:
        return ssl.PEM_cert_to_DER_cert((folder / f"{name}.pem").read_text())

    def served() -> bytes:
        return handshake(server, context(folder, "client"))[1]

    def replace(name: str) -> None:
        for kind in ("key", "pem"):
            shutil.copy(folder / f"{name}.{kind}", folder / "new")
            os.replace(folder / "new", folder / f"live.{kind}")

    with httpx.Client(verify=context(folder, "client"), timeout=30) as before:
        assert before.get(f"{server.url}/health").status_code == 200
        assert served() == der("server")
        replace("next")
        wait_for(lambda: served() == der("next"))
        assert before.get(f"{server.url}/health").status_code == 200  # on its connection
    (folder / "live.pem").write_text("half a cert")
    wait_for(lambda: "the new certificates cannot be used" in server.log())
    assert served() == der("next")
    replace("server")
    wait_for(lambda: served() == der("server"))
    assert status(server, folder, "client") == 200


def test_a_certificate_may_be_left_out_but_not_be_a_strangers(model, folder):
    with start(model, folder, "--ssl-cert-reqs", "1") as server:
        assert status(server, folder, None) == status(server, folder, "client") == 200
        with pytest.raises(httpx.TransportError):
            status(server, folder, "stranger")
        assert server.stop() == 0
