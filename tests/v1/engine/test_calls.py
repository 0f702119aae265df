"""The table of calls: one place from which LLM, LLMEngine, AsyncLLM and the development routes are made."""

from __future__ import annotations

import inspect

import pytest

from vllm import LLM
from vllm.entrypoints.async_llm import AsyncLLM
from vllm.server.serving.development import _READERS, router
from vllm.v1.engine.calls import BlockingCalls, EngineCalls, Route, check_sleep_level
from vllm.v1.engine.llm_engine import LLMEngine

CALLS = {name: call for name, call in vars(EngineCalls).items() if not name.startswith("_") and callable(call)}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_the_same_everywhere(name):
    call = CALLS[name]
    assert inspect.iscoroutinefunction(call) and call.__doc__
    assert getattr(AsyncLLM, name) is call
    for kind in (LLM, LLMEngine):
        own = getattr(kind, name)
        assert not inspect.iscoroutinefunction(own)
        assert (inspect.signature(own), own.__doc__, own.__name__) == (inspect.signature(call), call.__doc__, name)


def test_no_call_of_the_table_is_left_out():
    assert {name for name, own in vars(BlockingCalls).items() if inspect.isfunction(own)} == set(CALLS)


def test_each_route_of_the_table_is_served_and_its_arguments_can_be_read():
    served = {(route.path, *route.methods) for route in router.routes}
    routed = {name: call for name, call in inspect.getmembers(AsyncLLM, inspect.isfunction) if hasattr(call, "route")}
    assert {"sleep", "wake_up", "pause_generation", "get_weight_version"} <= set(routed)
    for call in routed.values():
        assert isinstance(call.route, Route) and (call.route.path, call.route.method) in served
        arguments = list(inspect.signature(call).parameters.values())[1:]
        assert {each.annotation for each in arguments} <= set(_READERS)


@pytest.mark.parametrize("level", [0, 3, -1])
def test_a_level_that_does_not_exist_names_what_to_do_instead(level):
    with pytest.raises(ValueError, match=rf"level must be 1 or 2, got {level}; pause_generation .* keeps the memory"):
        check_sleep_level(level)
