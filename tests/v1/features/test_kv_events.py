"""Events of the prefix cache: who follows them knows what the cache has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tiny_llm import make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.config.kv_events import KVEventsConfig
from vllm.v1.features.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.features.kv_events.publisher import END, EventPublisher, of_replica

READS = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture
def addresses(tmp_path: Path) -> dict[str, Any]:
    return {"endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = READS, **fields: Any) -> None:
    llm.generate([{"prompt_token_ids": each, **fields} for each in prompts], params, use_tqdm=False)


class Follower:
    """Asks for all batches again, as a subscriber does that has missed them."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def batches(self, first: int = 0) -> list[tuple[int, bytes]]:
        self.socket.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert self.socket.poll(20_000), "no answer"
            empty, number, data = self.socket.recv_multipart()
            assert empty == b""
            if number == END:
                return found
            found.append((int.from_bytes(number, "big"), data))

    def events(self) -> list[Any]:
        decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        return [event for _, data in self.batches() for event in decoder.decode(data).events]


def content(events: list[Any]) -> set[bytes]:
    """The hashes that are cached after these events; each event is checked by the ones before it."""
    there: set[bytes] = set()
    for event in events:
        if isinstance(event, BlockStored):
            assert event.parent_block_hash is None or event.parent_block_hash in there
            assert not there & set(event.block_hashes)
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            there |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            assert there >= set(event.block_hashes)
            there -= set(event.block_hashes)
        else:
            assert isinstance(event, AllBlocksCleared)
            there.clear()
    return there


def cached(llm: LLM) -> set[bytes]:
    return set(llm.llm_engine.engine_core.scheduler.kv.pool._block_of)


def settle(llm: LLM, follower: Follower) -> set[bytes]:
    """The hashes that the follower knows, once all waiting events were sent."""
    until = time.monotonic() + 20
    while (known := content(follower.events())) != cached(llm) and time.monotonic() < until:
        time.sleep(0.02)
    return known


@pytest.mark.parametrize(
    "fields",
    [{}, {"num_gpu_blocks_override": 10, "max_num_seqs": 3}, {"async_scheduling": True}, {"swap_space": 0.001}],
    ids=["plain", "few blocks", "steps ahead", "swap"],
)
def test_who_follows_the_events_knows_the_cache(folder, addresses, fields):
    llm = make_tiny_llm(folder, kv_events_config={"enable_kv_cache_events": True, **addresses}, **fields)
    follower = Follower(addresses["replay_endpoint"])
    assert settle(llm, follower) == set()
    prompts = [[3 + (number * 7 + place) % 90 for place in range(10 * number + 20)] for number in range(5)]
    for _ in range(2):
        run(llm, prompts, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
        assert cached(llm)
        assert settle(llm, follower) == cached(llm)
    assert llm.reset_prefix_cache()
    assert settle(llm, follower) == set()
    run(llm, prompts[:1])
    assert settle(llm, follower) == cached(llm)
    llm.llm_engine.engine_core.shutdown()


def test_the_messages_are_upstreams(folder, addresses):
    llm = make_tiny_llm(folder, kv_events_config={"enable_kv_cache_events": True, **addresses})
    follower, prompt = Follower(addresses["replay_endpoint"]), list(range(10, 60))
    run(llm, [prompt])
    assert settle(llm, follower)
    number, data = follower.batches()[0]
    moment, events, *rank = msgspec.msgpack.decode(data)
    assert number == 0 and abs(moment - time.time()) < 600 and rank == [0]
    kind, hashes, parent, token_ids, block_size, lora_id, medium, lora_name = events[0]
    assert (kind, parent, token_ids, block_size, lora_id, medium, lora_name) == (
        "BlockStored", None, prompt[:48], 16, None, "CPU", None,
    )  # fmt: skip
    assert len(hashes) == 3 and all(isinstance(each, bytes) for each in hashes)
    llm.llm_engine.engine_core.shutdown()


def test_subscribers_get_topic_number_and_batch(addresses):
    publisher = EventPublisher(KVEventsConfig(enable_kv_cache_events=True, topic="kv", buffer_steps=2, **addresses))
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(addresses["endpoint"])
    socket.setsockopt_string(zmq.SUBSCRIBE, "kv")
    # Nothing tells a publisher's owner when a subscription has arrived.
    numbers: list[int] = []
    for moment in range(400):
        publisher.publish(KVEventBatch(float(moment), [AllBlocksCleared()]))
        while socket.poll(20):
            topic, number, data = socket.recv_multipart()
            assert topic == b"kv"
            numbers.append(int.from_bytes(number, "big"))
            assert msgspec.msgpack.decode(data)[:2] == [float(numbers[-1]), [["AllBlocksCleared"]]]
        if len(numbers) > 3:
            break
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    follower = Follower(addresses["replay_endpoint"])
    assert [number for number, _ in follower.batches(0)] == numbers[-2:]
    assert [number for number, _ in follower.batches(numbers[-1])] == numbers[-1:]
    publisher.close()
    socket.close(0)


def test_a_replica_has_ports_of_its_own():
    assert of_replica("tcp://*:5557", 0) == "tcp://*:5557" and of_replica("tcp://*:5557", 3) == "tcp://*:5560"
    assert of_replica("ipc:///tmp/events", 1) == "ipc:///tmp/events_dp1"


@pytest.mark.parametrize("config", [None, {}, {"enable_kv_cache_events": False}, {"publisher": "null"}])
def test_neutral_values_publish_nothing(folder, config):
    llm = make_tiny_llm(folder, kv_events_config=config)
    assert llm.llm_engine.vllm_config.kv_events_config is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"enable_kv_cache_events": True, "publisher": "kafka"}, "publisher"),
        ({"enable_kv_cache_events": True, "port": 1}, "port"),
        ({"enable_kv_cache_events": True, "endpoint": "nowhere"}, "endpoint='nowhere'"),
        ("many", "kv_events_config"),
    ],
)
def test_bad_values_are_refused(folder, config, said):
    with pytest.raises(ValueError, match=said):
        make_tiny_llm(folder, kv_events_config=config)
