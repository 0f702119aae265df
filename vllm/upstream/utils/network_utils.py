"""Addresses and ports."""

from __future__ import annotations

import ipaddress
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RESERVED_PORTS = 10


def get_ip() -> str:
    """This machine's address: VLLM_HOST_IP, else that of the interface that leads out, else 0.0.0.0."""
    host = os.environ.get("VLLM_HOST_IP")
    if host:
        return host
    for family, outside in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888")):
        try:
            # Nothing is sent: connecting a datagram socket only chooses the interface.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((outside, 80))
                return probe.getsockname()[0]
        except OSError:
            continue
    return "0.0.0.0"


def get_loopback_ip() -> str:
    """127.0.0.1, or ::1 where only that can be bound.

    Raises:
        RuntimeError: neither can.
    """
    for address, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        if test_loopback_bind(address, family):
            return address
    raise RuntimeError("neither 127.0.0.1 nor ::1 can be bound")


def test_loopback_bind(address: str, family: int) -> bool:
    """Whether a port of the address can be bound."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    except OSError:
        return False


def is_valid_ipv6_address(address: str) -> bool:
    """Whether it is one."""
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def split_host_port(host_port: str) -> tuple[str, int]:
    """ "host:port" or "[v6 address]:port" as its two parts.

    Raises:
        ValueError, IndexError: it is neither.
    """
    if host_port.startswith("["):
        host, rest = host_port[1:].rsplit("]", 1)
        port = rest.split(":")[1]
        if rest != f":{port}":
            raise ValueError(f"not an address and a port: {host_port!r}")
        return host, int(port)
    host, port = host_port.split(":")
    return host, int(port)


def join_host_port(host: str, port: int) -> str:
    """The two as one text."""
    return f"[{host}]:{port}" if is_valid_ipv6_address(host) else f"{host}:{port}"


def get_tcp_uri(ip: str, port: int) -> str:
    """tcp://ip:port."""
    return f"tcp://{join_host_port(ip, port)}"


def get_distributed_init_method(ip: str, port: int) -> str:
    """The method by which torch.distributed meets there."""
    return get_tcp_uri(ip, port)


def get_file_store_init_method() -> str:
    """The method by which torch.distributed meets in a new file of this machine."""
    import tempfile

    return f"file://{tempfile.gettempdir()}/vllm-{uuid.uuid4().hex}"


def get_open_zmq_ipc_path() -> str:
    """A free ZeroMQ address of this machine."""
    import tempfile

    return f"ipc://{tempfile.gettempdir()}/{uuid.uuid4()}"


def get_open_zmq_inproc_path() -> str:
    """A free ZeroMQ address of this process."""
    return f"inproc://{uuid.uuid4()}"


def get_open_port() -> int:
    """A free port: the first from VLLM_PORT on, where that is set, else any. Those that VLLM_DP_MASTER_PORT keeps for
    itself, it and the nine after it, are left out."""
    return get_open_ports_list(1)[0]


def get_open_ports_list(count: int = 5) -> list[int]:
    """So many of them, all different."""
    master, start = os.environ.get("VLLM_DP_MASTER_PORT"), os.environ.get("VLLM_PORT")
    reserved = range(int(master), int(master) + _RESERVED_PORTS) if master else range(0)
    found: list[int] = []
    port = int(start) if start else 0
    while len(found) < count:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind(("", port))
                free = probe.getsockname()[1]
        except OSError:
            free = None
        if free is not None and free not in reserved and free not in found:
            found.append(free)
        if start:
            port = reserved.stop if port + 1 in reserved else port + 1
    return found


def split_zmq_path(path: str) -> tuple[str, str, str]:
    """(scheme, host, port) of a ZeroMQ address; the port is empty but for tcp.

    Raises:
        ValueError: a part is missing.
    """
    from urllib.parse import urlparse

    parsed = urlparse(path)
    if not parsed.scheme:
        raise ValueError(f"no scheme in the ZeroMQ address {path!r}")
    host, port = parsed.hostname or "", str(parsed.port or "")
    if parsed.scheme == "tcp" and not (host and port):
        raise ValueError(f"a tcp address needs a host and a port, got {path!r}")
    if parsed.scheme != "tcp":
        # A path or a name, with its case.
        return parsed.scheme, f"{parsed.netloc}{parsed.path}", ""
    return parsed.scheme, host, port


def make_zmq_path(scheme: str, host: str, port: int | None = None) -> str:
    """The address of the parts."""
    return f"{scheme}://{host}" if port is None else f"{scheme}://{join_host_port(host, port)}"


def make_zmq_socket(
    ctx: Any,
    path: str,
    socket_type: Any,
    bind: bool | None = None,
    identity: bytes | None = None,
    linger: int | None = None,
    router_handover: bool = False,
) -> Any:
    """A ZeroMQ socket with unbounded queues, bound or connected.

    Args:
        ctx: zmq.Context, or that of zmq.asyncio.
        path: where to.
        bind: None: all but PUSH, SUB and XSUB sockets are bound.
        identity: the name that a ROUTER knows it by.
        linger: milliseconds that closing waits for what is not sent yet; None: for ever.
        router_handover: a new peer takes the name of an older one.
    """
    import zmq

    made = ctx.socket(socket_type)
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    if identity is not None:
        made.setsockopt(zmq.IDENTITY, identity)
    if linger is not None:
        made.setsockopt(zmq.LINGER, linger)
    if router_handover:
        made.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if path.startswith("tcp://") and is_valid_ipv6_address(split_zmq_path(path)[1]):
        made.setsockopt(zmq.IPV6, 1)
    is_server = socket_type not in (zmq.PUSH, zmq.SUB, zmq.XSUB) if bind is None else bind
    (made.bind if is_server else made.connect)(path)
    return made


@contextmanager
def zmq_socket_ctx(
    path: str,
    socket_type: Any,
    bind: bool | None = None,
    linger: int = 0,
    identity: bytes | None = None,
    router_handover: bool = False,
) -> Iterator[Any]:
    """`make_zmq_socket`, in a context of its own that ends with it."""
    import zmq

    context = zmq.Context()
    try:
        yield make_zmq_socket(context, path, socket_type, bind, identity, router_handover=router_handover)
    finally:
        context.destroy(linger=linger)


def make_zmq_listener(ctx: Any, host: str, port: int, socket_type: int) -> tuple[Any, int]:
    """A bound ZeroMQ socket, and its port; 0 lets the system choose."""
    import zmq

    listener = ctx.socket(socket_type)
    listener.bind(f"tcp://{host}:{port or '*'}")
    address = listener.getsockopt_string(zmq.LAST_ENDPOINT)
    return listener, int(address.rpartition(":")[2])


def find_process_using_port(port: int) -> Any:
    """The process, as psutil has it, that listens on the port; None: none that is to be seen. Needs psutil."""
    import psutil

    for connection in psutil.net_connections():
        if connection.laddr and connection.laddr.port == port and connection.pid:
            return psutil.Process(connection.pid)
    return None
