"""Helpers that upstream's callers import by their names."""

from __future__ import annotations

import asyncio
import os
import random
import socket

import numpy as np
import pytest
import torch
import zmq

import vllm.utils as utils
from vllm.entrypoints.pooling.utils import build_metadata_items, decode_pooling_output
from vllm.upstream import utils as upstream_utils
from vllm.utils import collection_utils, func_utils, import_utils, jsontree, math_utils, mem_utils, network_utils
from vllm.utils.async_utils import collect_from_async_generator, make_async, merge_async_iterators
from vllm.utils.counter import AtomicCounter, Counter
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.utils.print_utils import print_embeddings
from vllm.utils.serial_utils import EMBED_DTYPES, binary2tensor, tensor2binary
from vllm.utils.system_utils import set_env_var, suppress_stdout, unique_filepath, update_environment_variables
from vllm.utils.torch_utils import (
    is_torch_equal_or_newer,
    make_tensor_with_pad,
    set_default_torch_dtype,
    set_default_torch_num_threads,
    set_random_seed,
)
from vllm.utils.tqdm_utils import maybe_tqdm


def test_every_name_of_the_package_is_there():
    assert all(hasattr(utils, name) for name in upstream_utils.__all__)
    assert len(utils.random_uuid()) == 32 and utils.random_uuid() != utils.random_uuid()


def test_lists():
    assert utils.is_list_of([1, "a"], int)
    assert not utils.is_list_of([1, "a"], int, check="all")
    assert utils.is_list_of([], int) and not utils.is_list_of((1,), int)
    assert collection_utils.is_list_of_numbers([1, 0.5, 2**1024])
    assert not any(map(collection_utils.is_list_of_numbers, ([True], [float("nan")], ["1"], (1,), None)))
    assert list(utils.chunk_list([1, 2, 3], 2)) == [[1, 2], [3]]
    assert utils.flatten_2d_lists([[1], (2, 3)]) == [1, 2, 3]
    assert dict(utils.full_groupby("abca", key=str.upper)) == {"A": ["a", "a"], "B": ["b"], "C": ["c"]}
    assert utils.as_list((1, 2)) == [1, 2]
    assert collection_utils.common_prefix(["aba", "abc", "ab"]) == "ab"
    assert collection_utils.common_prefix([[1, 2], [1, 3]]) == [1]
    swapped = {1: "a", 2: "b", 3: "c"}
    collection_utils.swap_dict_values(swapped, 1, 2)
    collection_utils.swap_dict_values(swapped, 3, 4)
    assert swapped == {1: "b", 2: "a", 4: "c"}


def test_numbers():
    assert (utils.cdiv(7, 2), utils.cdiv(-7, 2), utils.round_up(5, 4), utils.round_down(7, 4)) == (4, -3, 8, 4)
    assert [utils.next_power_of_2(n) for n in (0, 1, 5, 8)] == [1, 1, 8, 8]
    assert [math_utils.prev_power_of_2(n) for n in (0, 1, 5, 8)] == [0, 1, 4, 8]
    assert math_utils.largest_power_of_2_divisor(24) == 8
    assert (mem_utils.format_gib(3 * 2**29), mem_utils.format_mib(2**20)) == ("1.50", "1.00")
    counter = Counter(3)
    assert (next(counter), next(counter)) == (3, 4)
    counter.reset()
    assert next(counter) == 0
    atomic = AtomicCounter(1)
    assert (atomic.inc(4), atomic.dec(), atomic.value) == (5, 4, 4)


def test_functions():
    def takes(a, *, b=0):
        return a, b

    assert func_utils.supports_kw(takes, "b", requires_kw_only=True)
    assert not func_utils.supports_kw(takes, "a", requires_kw_only=True)
    assert not func_utils.supports_kw(takes, "c")
    assert func_utils.supports_kw(lambda **kw: None, "c")
    assert not func_utils.supports_kw(lambda **kw: None, "kw")
    assert func_utils.get_allowed_kwarg_only_overrides(takes, {"a": 1, "b": 2}) == {"b": 2}
    calls: list[int] = []
    once = func_utils.run_once(calls.append)
    once(1)
    once(2)
    assert calls == [1]


def test_trees():
    tree = {"a": [1, (2, 3)], "b": 4}
    assert jsontree.json_map_leaves(lambda leaf: leaf * 2, tree) == {"a": [2, (4, 6)], "b": 8}
    assert jsontree.json_count_leaves(tree) == 4
    assert jsontree.json_reduce_leaves(lambda a, b: a + b, tree) == 10


def test_modules_by_name(tmp_path):
    assert import_utils.resolve_obj_by_qualname("os.path.join") is os.path.join
    (tmp_path / "plugin_of_mine.py").write_text("VALUE = 42")
    assert import_utils.import_plugin(str(tmp_path / "plugin_of_mine.py")).VALUE == 42
    assert import_utils.import_plugin("no_such_plugin_anywhere") is None


def test_ports(monkeypatch):
    monkeypatch.delenv("VLLM_DP_MASTER_PORT", raising=False)
    monkeypatch.setenv("VLLM_PORT", "42123")
    ports = network_utils.get_open_ports_list(3)
    assert len(set(ports)) == 3 and min(ports) >= 42123
    monkeypatch.setenv("VLLM_DP_MASTER_PORT", "42120")
    assert network_utils.get_open_port() >= 42130
    monkeypatch.delenv("VLLM_PORT")
    with socket.socket() as probe:
        probe.bind(("localhost", network_utils.get_open_port()))


def test_addresses(monkeypatch):
    for pair in (("127.0.0.1", 55), ("::1", 55)):
        assert network_utils.split_host_port(network_utils.join_host_port(*pair)) == pair
    for text in ("127.0.0.1::5", "127.0.0.1", "host:5a", "[::1]::5"):
        with pytest.raises(ValueError):
            network_utils.split_host_port(text)
    assert network_utils.get_tcp_uri("::1", 5) == "tcp://[::1]:5"
    assert network_utils.split_zmq_path("tcp://[::1]:5") == ("tcp", "::1", "5")
    assert network_utils.split_zmq_path("ipc:///tmp/A") == ("ipc", "/tmp/A", "")
    for text in ("name", "tcp://host", "tcp://:5"):
        with pytest.raises(ValueError):
            network_utils.split_zmq_path(text)
    assert network_utils.make_zmq_path("tcp", "::1", 5) == "tcp://[::1]:5"
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    assert utils.get_ip() == "10.0.0.7"
    monkeypatch.delenv("VLLM_HOST_IP")
    assert utils.get_ip().count(".") == 3 or ":" in utils.get_ip()
    assert network_utils.get_loopback_ip() in ("127.0.0.1", "::1")
    assert network_utils.get_file_store_init_method() != network_utils.get_file_store_init_method()


def test_sockets():
    path = network_utils.get_open_zmq_ipc_path()
    with (
        network_utils.zmq_socket_ctx(path, zmq.ROUTER) as server,
        network_utils.zmq_socket_ctx(path, zmq.DEALER, bind=False, identity=b"me") as client,
    ):
        client.send(b"hello")
        assert server.recv_multipart() == [b"me", b"hello"]


def test_coroutines():
    closed = []

    async def numbers(name, count):
        try:
            for number in range(count):
                yield number
                await asyncio.sleep(0)
        finally:
            closed.append(name)

    async def main():
        merged = await collect_from_async_generator(merge_async_iterators(numbers("a", 2), numbers("b", 3)))
        assert sorted(merged) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
        endless = merge_async_iterators(numbers("c", 10**9), numbers("d", 10**9))
        await anext(endless)
        await endless.aclose()
        return await make_async(lambda a, b: a + b)(1, b=2)

    assert asyncio.run(main()) == 3
    assert sorted(closed) == ["a", "b", "c", "d"]


def test_the_process(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("VLLM_A_VARIABLE", "1")
    update_environment_variables({"VLLM_A_VARIABLE": "2"})
    assert os.environ["VLLM_A_VARIABLE"] == "2"
    with set_env_var("VLLM_A_VARIABLE", "3"):
        assert os.environ["VLLM_A_VARIABLE"] == "3"
    assert os.environ["VLLM_A_VARIABLE"] == "2"
    (tmp_path / "0").touch()
    assert unique_filepath(lambda index: tmp_path / str(index)).name == "1"
    with suppress_stdout():
        os.write(1, b"hidden")
    os.write(1, b"shown")
    assert capfd.readouterr().out == "shown"


def test_torch_settings():
    draws = []
    for _ in range(2):
        set_random_seed(5)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    set_random_seed(5, data_parallel_index=1)
    assert random.random() != draws[0][0]
    with pytest.raises(KeyError), set_default_torch_dtype(torch.float64):
        assert torch.ones(1).dtype is torch.float64
        raise KeyError
    assert torch.ones(1).dtype is torch.float32
    before = torch.get_num_threads()
    with set_default_torch_num_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    assert is_torch_equal_or_newer("2.0") and not is_torch_equal_or_newer("99.0")
    padded = make_tensor_with_pad([[1, 2], [3]], -1, torch.int64, max_len=3)
    assert padded.tolist() == [[1, 2, -1], [3, -1, -1]]


def test_hashes_and_printing(capsys):
    assert get_hash_fn_by_name("sha256") is sha256
    assert sha256((1, "a")) == sha256((1, "a")) != sha256((2, "a"))
    with pytest.raises(ValueError, match="sha256"):
        get_hash_fn_by_name("crc")
    print_embeddings([0.5] * 20)
    assert "size=20" in capsys.readouterr().out
    assert list(maybe_tqdm([1, 2], use_tqdm=False)) == [1, 2]
    assert list(maybe_tqdm([1, 2], use_tqdm=lambda it, **_: reversed(it))) == [2, 1]


@pytest.mark.parametrize("endianness", ["native", "big", "little"])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_tensors_as_bytes(kind, endianness):
    values = torch.tensor([[1.0, -2.0, 0.5], [0.0, 4.0, -0.25]])
    items = build_metadata_items(kind, endianness, (3,), 2)
    assert items[1].end == 2 * items[0].end == 6 * EMBED_DTYPES[kind].nbytes
    rows = decode_pooling_output(items[::-1], tensor2binary(values, kind, endianness))
    assert torch.equal(torch.stack([row.float() for row in rows]), values)


def test_bytes_are_in_their_order():
    assert tensor2binary(torch.tensor([1.0]), "float32", "big") == b"\x3f\x80\x00\x00"
    assert tensor2binary(torch.tensor([1.0]), "bfloat16", "little") == b"\x80\x3f"
    assert binary2tensor(b"\x3f\x80\xbf\x80", (-1,), "bfloat16", "big").tolist() == [1, -1]
    with pytest.raises(ValueError, match="embed_dtype must be one of float32"):
        tensor2binary(torch.ones(1), "int4", "big")
    with pytest.raises(ValueError, match="endianness"):
        binary2tensor(b"", (-1,), "float32", "middle")


def test_what_is_made_when_it_is_looked_at():
    made = []
    lazy = collection_utils.LazyDict({"a": lambda: made.append("a") or 1, "b": lambda: 2})
    assert len(lazy) == 2 and not made
    assert lazy["a"] == lazy["a"] == 1 and made == ["a"] and list(lazy) == ["a", "b"]
    names: dict[str, object] = {}
    names["fractions"] = module = import_utils.LazyLoader("fractions", names, "fractions")
    assert str(module.Fraction(1, 2)) == "1/2" and names["fractions"] is not module
    missing = import_utils.PlaceholderModule("nowhere").placeholder_attr("thing")
    with pytest.raises(ModuleNotFoundError, match="nowhere.thing is not installed"):
        missing()


def test_an_operation_is_registered():
    from vllm.utils.torch_utils import direct_register_custom_op

    def add_one_in_a_test(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    direct_register_custom_op("add_one_in_a_test", add_one_in_a_test, fake_impl=torch.empty_like)
    assert torch.ops.vllm.add_one_in_a_test(torch.ones(2)).tolist() == [2, 2]


def test_listeners_find_a_port():
    context = zmq.Context()
    listener, port = network_utils.make_zmq_listener(context, "127.0.0.1", 0, zmq.ROUTER)
    assert 0 < port < 65536
    listener.close()
    context.term()
