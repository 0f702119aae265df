"""Guests are called in the order that is written down, only where they are configured and only what they define."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_llm import make_tiny_llm

from vllm.v1.features.build import ORDER, SCHEDULER_ORDER
from vllm.v1.worker.gpu.guests import RunnerGuest, hooks

ROOMS = Path(__file__).parents[3] / "vllm/v1/features"
CONNECTOR = {
    "kv_connector": "FileConnector",
    "kv_connector_module_path": "file_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"folder": "blocks"},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


# Guests that a plain engine of a dense model does without.
ASKED = {"stages", "states", "drafts", "adapters", "prompt_embeds", "images", "swap"}
ASKED |= {"kv_store", "kv_events", "kv_connector"}


def rooms_of(guests: Any) -> list[str]:
    return [type(guest).__module__.split(".")[3] for guest in guests]


@pytest.mark.parametrize(
    ("fields", "absent"),
    [
        ({}, ASKED),
        ({"enable_prefix_caching": False}, ASKED | {"hidden_cache", "broken_prompts"}),
        (
            {"speculative_config": NGRAM, "enable_lora": True, "swap_space": 0.01, "enable_prompt_embeds": True},
            ASKED - {"drafts", "adapters", "prompt_embeds", "swap"},
        ),
        (
            {"kv_store": "store", "kv_events_config": {"enable_kv_cache_events": True, "endpoint": "ipc://events"}},
            ASKED - {"kv_store", "kv_events"},
        ),
        ({"kv_transfer_config": CONNECTOR, "swap_space": 0.01}, ASKED - {"kv_connector", "swap"}),
    ],
    ids=["none", "no prefix cache", "many", "blocks beyond the engine", "a connector"],
)
def test_guests_are_those_of_the_configuration_in_their_order(folder, fields, absent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    core = make_tiny_llm(folder, **fields).llm_engine.engine_core
    runner = core.executor.worker.model_runner
    assert rooms_of(runner.guests) == [name for name in ORDER if name not in absent]
    assert rooms_of(core.scheduler.guests) == [name for name in SCHEDULER_ORDER if name not in absent]


def test_a_call_upon_the_engine_reaches_the_guest_that_answers_it(folder):
    core = make_tiny_llm(folder, enable_lora=True).llm_engine.engine_core
    assert core.call("list_loras") == set() and not core.call("remove_lora", 1)
    assert core.call("is_sleeping") is False
    plain = make_tiny_llm(folder).llm_engine.engine_core
    with pytest.raises(AttributeError, match="list_loras"):
        plain.call("list_loras")


def test_every_room_has_its_place():
    for file, order in (("runner.py", ORDER), ("scheduler.py", SCHEDULER_ORDER)):
        assert sorted(path.parent.name for path in ROOMS.glob(f"*/{file}")) == sorted(order)


def test_hooks_are_those_that_a_class_defines():
    class One(RunnerGuest):
        def remove(self, slot: int) -> None:
            pass

    class Two(One):
        def begin(self, step: Any) -> None:
            pass

    one, two = One(), Two()
    assert hooks([two, RunnerGuest(), one], "remove") == (two.remove, one.remove)
    assert hooks([one, two], "begin") == (two.begin,)
    assert hooks([one, two], "reset") == ()
