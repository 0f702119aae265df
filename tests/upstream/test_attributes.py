"""Attributes of the engine's classes for upstream's callers."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from vllm.logprobs import FlatLogprobs
from vllm.upstream.attributes import ROWS
from vllm.upstream.editable_logprobs import EditableLogprobs
from vllm.upstream.finder import _WITH_ATTRIBUTES


@pytest.mark.parametrize("module", ROWS)
def test_a_class_has_them_once_its_module_is_imported(module):
    assert set(ROWS) == _WITH_ATTRIBUTES
    for name, attributes in ROWS[module].items():
        owner = importlib.import_module(module)
        own = vars(getattr(owner, name) if name else owner)
        assert all(own[attribute] is value for attribute, value in attributes.items())


def test_upstreams_path_to_a_worker_ends_at_the_object_that_is_all_of_it():
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.worker import Worker

    core, worker = object.__new__(EngineCore), object.__new__(Worker)
    core.executor = SimpleNamespace(driver_worker=worker)
    assert core.engine_core.model_executor.driver_worker.worker is worker
    with pytest.raises(NotImplementedError, match="save_sharded_state: workers read only their share"):
        core.save_sharded_state("folder")


def test_flat_logprobs_of_a_caller_are_to_be_filled_and_the_engines_are_not():
    assert type(FlatLogprobs()) is EditableLogprobs and isinstance(FlatLogprobs(token_ids=[1]), FlatLogprobs)
    assert type(FlatLogprobs(None, 2)) is FlatLogprobs


def test_a_renderer_is_refused_by_name_and_is_not_there_to_those_who_ask():
    from vllm import LLM, AsyncLLM

    for kind in (LLM, AsyncLLM):
        engine = object.__new__(kind)
        message = rf"{kind.__name__}\.renderer: rendering has no class of its own: use LLM\.chat"
        with pytest.raises(NotImplementedError, match=message):
            engine.renderer  # noqa: B018 - the property raises
        assert getattr(engine, "renderer", None) is None


def test_prompts_become_dicts():
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    assert parse_model_prompt(None, "a text") == {"prompt": "a text"}
    assert parse_model_prompt(None, [5, 6]) == {"prompt_token_ids": [5, 6]}
    given = {"prompt_token_ids": [5], "cache_salt": "s"}
    assert parse_model_prompt(None, given) is given
    for wrong in (5, ["a"], b"text", [True], {"text": "a"}):
        with pytest.raises(
            ValueError, match="prompt must be a text, a list of token ids or a dict with one of prompt,"
        ):
            parse_model_prompt(None, wrong)
