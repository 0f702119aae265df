"""Pictures come from allowed hosts at public addresses, and from files below one folder."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from pictures import drawn, file_of

from vllm.exceptions import VLLMValidationError
from vllm.inputs.media import MediaAccess, PictureLoader, PictureSource
from vllm.inputs.media import fetching as fetching_module

PNG = file_of(drawn())


class _Pages(BaseHTTPRequestHandler):
    """Pictures, and what else a host may answer."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers["Host"]))
        name, _, rest = self.path[1:].partition("?")
        if name == "redirect":
            self._send(302, b"", Location=rest)
        elif name == "status":
            self._send(int(rest), b"no")
        elif name == "long":
            self._send(200, b"", length=2**40)
        elif name == "endless":
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            try:
                while not self.server.stopped.wait(0.001):
                    self.wfile.write(bytes(2**16))
            except OSError:
                pass
        elif name == "slow":
            self.server.stopped.wait(30)
        elif name == "gzip":
            self._send(200, PNG, **{"Content-Encoding": "gzip"})
        else:
            self._send(200, PNG if name.endswith(".png") else b"<html>")

    def _send(self, status: int, body: bytes, length: int | None = None, **fields: str) -> None:
        self.send_response(status)
        for key, value in fields.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def pages():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    server.daemon_threads = True
    server.seen, server.stopped = [], threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.stopped.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def names(monkeypatch):
    """Hosts that tests know, and how often each was looked up."""
    known = {"pictures.test": ["127.0.0.1"], "other.test": ["127.0.0.1"], "metadata.test": ["169.254.169.254"]}
    asked: list[str] = []

    def addresses(host: str, port: int) -> list[str]:
        asked.append(host)
        return known.get(host, [host] if host[0].isdigit() or ":" in host else [])

    monkeypatch.setattr(fetching_module, "_addresses", addresses)
    known["asked"] = asked
    return known


def load(url: str, *allowed: str, path: object = None):
    loader = PictureLoader(MediaAccess.of(list(allowed), path))
    return loader.load_now([PictureSource("picture", url=url)]).images[0]


def refused(words: str, url: str, *allowed: str, path: object = None) -> str:
    with pytest.raises(VLLMValidationError, match=words) as found:
        load(url, *allowed, path=path)
    assert found.value.parameter == "picture"
    return str(found.value)


LOOPBACK = ("pictures.test", "127.0.0.0/8")


def test_an_allowed_host_is_fetched_from(pages, names):
    port = pages.server_port
    image = load(f"http://pictures.test:{port}/a.png?b=c", *LOOPBACK)
    np.testing.assert_array_equal(np.asarray(image), np.asarray(drawn()))
    assert pages.seen[-1] == ("/a.png?b=c", f"pictures.test:{port}")
    assert load(f"HTTP://Pictures.Test.:{port}/a.png", *LOOPBACK, "other.test").size == (30, 20)
    assert pages.seen[-1][1] == f"pictures.test:{port}"
    assert load(f"http://127.0.0.1:{port}/a.png", "127.0.0.1").size == (30, 20)


def test_other_hosts_are_not_asked_for(pages, names):
    port = pages.server_port
    before = len(pages.seen)
    for allowed in ((), ("other.test", "127.0.0.0/8"), ("test", "127.0.0.0/8")):
        refused("fetches nothing from 'pictures.test'", f"http://pictures.test:{port}/a.png", *allowed)
    for url in (
        f"http://pictures.test@evil.test:{port}/a.png",
        f"http://evil.test:{port}\\@pictures.test/a.png",
        f"http://evil.test:{port}#@pictures.test/a.png",
        f"http://pictures.test.evil.test:{port}/a.png",
        f"http://pictures.test:{port} /a.png",
        f"http://pictures.test:{port}/a\r\nHost: x/a.png",
        "http://",
        "http:///a.png",
        "http://pictures.test:0/a.png",
        "http://pictures.test:99999/a.png",
        "http://[::1/a.png",
        f"http://pictur\u0435s.test:{port}/a.png",  # its fifth letter is Cyrillic
    ):
        refused("picture", url, *LOOPBACK)
    assert len(pages.seen) == before and not [name for name in names["asked"] if name != "pictures.test"]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "64:ff9b::7f00:1", "2002:7f00:1::", "ff02::1",
    ],
)  # fmt: skip
def test_an_address_that_is_not_public_needs_its_network(address, names):
    access = MediaAccess.of(["pictures.test"], None)
    assert access.allowed([address]) == [] and access.allowed(["93.184.216.34", address]) == ["93.184.216.34"]
    names["pictures.test"] = [address]
    refused("no public address", "http://pictures.test/a.png", "pictures.test")


def test_the_address_that_was_looked_at_is_the_one_that_is_connected_to(pages, names, monkeypatch):
    """A name that means a public address first and a private one then gets nowhere near the latter."""
    answers = iter([["192.0.2.1"], ["127.0.0.1"], ["127.0.0.1"]])
    monkeypatch.setattr(fetching_module, "_addresses", lambda host, port: next(answers))
    monkeypatch.setattr(MediaAccess, "allowed", lambda self, found: [each for each in found if each == "192.0.2.1"])
    connected = []

    async def connect_tcp(self, host, *rest):
        import httpcore

        connected.append(host)
        raise httpcore.ConnectError

    monkeypatch.setattr("httpcore.AnyIOBackend.connect_tcp", connect_tcp)
    refused("could not be fetched", f"http://pictures.test:{pages.server_port}/a.png", "pictures.test")
    assert connected == ["192.0.2.1"]


def test_a_redirect_is_followed_to_allowed_hosts_alone(pages, names, monkeypatch):
    port, seen = pages.server_port, pages.seen
    start = f"http://pictures.test:{port}/redirect?"
    assert load(start + "/a.png", *LOOPBACK).size == (30, 20)
    assert load(f"{start}http://other.test:{port}/a.png", *LOOPBACK, "other.test").size == (30, 20)
    refused("from 'other.test'", f"{start}http://other.test:{port}/a.png", *LOOPBACK)
    assert seen[-1][0].startswith("/redirect")
    refused("no public address", f"{start}http://metadata.test/latest", *LOOPBACK, "metadata.test")
    refused("no http or https URL", start + "file:///etc/passwd", *LOOPBACK)
    refused("no http or https URL", start + "data:image/png;base64,AAAA", *LOOPBACK)
    refused("redirected more than", start + start[:-1], *LOOPBACK)
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    refused("ALLOW_REDIRECTS", start + "/a.png", *LOOPBACK)


def test_answers_that_are_no_picture(pages, names, monkeypatch):
    base = f"http://pictures.test:{pages.server_port}/"
    refused("status 404", base + "status?404", *LOOPBACK)
    refused("status 500", base + "status?500", *LOOPBACK)
    refused("no picture", base + "page.html", *LOOPBACK)
    refused("compressed", base + "gzip", *LOOPBACK)
    refused("more than", base + "long", *LOOPBACK)
    monkeypatch.setattr(fetching_module, "MAX_BYTES", 2**20)
    refused("more than", base + "endless", *LOOPBACK)
    monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "0.2")
    refused("within 0.2 s", base + "slow", *LOOPBACK)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        refused("could not be fetched", f"http://pictures.test:{unused.getsockname()[1]}/a.png", *LOOPBACK)
    refused("could not be fetched", "http://unknown.test/a.png", "unknown.test")


def test_the_event_loop_goes_on_while_pictures_are_fetched(pages, names):
    async def main() -> int:
        loader = PictureLoader(MediaAccess.of(LOOPBACK, None))
        url = f"http://pictures.test:{pages.server_port}/slow"
        waiting = [asyncio.create_task(loader.load([PictureSource("picture", url=url)])) for _ in range(20)]
        await asyncio.sleep(0.02)
        assert not any(each.done() for each in waiting)
        # Pictures that are here do not wait for those that are fetched.
        found = await loader.load([PictureSource("picture", data=base64.b64encode(PNG).decode())])
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        return len(found.images)

    assert asyncio.run(main()) == 1


@pytest.fixture
def folder(tmp_path):
    allowed = tmp_path / "allowed"
    (allowed / "in a folder").mkdir(parents=True)
    for path in (allowed / "in a folder" / "ä b.png", allowed / "a.png", tmp_path / "secret.png"):
        path.write_bytes(PNG)
    (allowed / "inward.png").symlink_to(allowed / "a.png")
    (allowed / "outward.png").symlink_to(tmp_path / "secret.png")
    (allowed / "up").symlink_to(tmp_path)
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "allowed-too" / "a.png").write_bytes(PNG)
    os.mkfifo(allowed / "pipe.png")
    return allowed


def test_files_below_the_folder_are_read(folder):
    for name in ("a.png", "inward.png", "in%20a%20folder/%C3%A4%20b.png", "in a folder/../a.png"):
        assert load(f"file://{folder}/{name}", path=folder).size == (30, 20)
    assert load(f"file://localhost{folder}/a.png", path=str(folder)).size == (30, 20)


def test_no_other_file_is_read_and_none_is_told_of(folder):
    outside = folder.parent
    problem = "no file below the server's --allowed-local-media-path"
    said = {
        refused(problem, url, path=folder).replace(url, "")
        for url in (
            f"file://{outside}/secret.png",
            f"file://{outside}/missing.png",
            f"file://{folder}/missing.png",
            f"file://{folder}/../secret.png",
            f"file://{folder}/%2e%2e/secret.png",
            f"file://{folder}/outward.png",
            f"file://{folder}/up/secret.png",
            f"file://{outside}/allowed-too/a.png",
            f"file://{folder}",
            f"file://{folder}/pipe.png",
            f"file://{folder}/a.png%00",
            "file:///etc/passwd",
            "file:///dev/zero",
            "file:a.png",
        )
    }
    assert len(said) == 1 and str(outside) not in said.pop()
    refused("has no host", f"file://host{folder}/a.png", path=folder)
    refused("reads no files", f"file://{folder}/a.png")


def test_a_file_that_is_too_long(folder, monkeypatch):
    monkeypatch.setattr("vllm.inputs.media.access.MAX_BYTES", 100)
    refused("more than 100 bytes", f"file://{folder}/a.png", path=folder)


@pytest.mark.parametrize(
    ("domains", "path", "words"),
    [
        ("example.com", None, "list of hosts"),
        ([""], None, "has hosts"),
        ([3], None, "has hosts"),
        (["http://example.com"], None, "without scheme"),
        (["example.com:80"], None, "without scheme"),
        (["*.example.com"], None, "has hosts"),
        (["10.0.0.1/8"], None, "without scheme"),
        (None, "/no/such/folder", "folder that exists"),
        (None, 3, "must be a folder"),
    ],
)
def test_bad_permissions_are_errors_at_the_start(domains, path, words):
    with pytest.raises(ValueError, match=words):
        MediaAccess.of(domains, path)
