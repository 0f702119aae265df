"""Fields that upstream's callers give with a request beside its prompt, and parts of an engine that they reach for."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from asgi import AppThread, Serve
from processes import children
from tiny_llm import make_tiny_llm

from vllm import SamplingParams
from vllm.config.lora import MaxLoRARanks
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.core_process.serial import decode_request, encode_request
from vllm.v1.messages import EngineCoreRequest

ONE = SamplingParams(max_tokens=1, temperature=0)


@dataclass
class Hints:
    message_id: str
    actions: list[dict[str, Any]]


@pytest.fixture(scope="module")
def llm(folder):
    return make_tiny_llm(folder)


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve(enable_log_requests=True)


def finished(engine: Any) -> Any:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1]


def test_they_stay_with_the_request(llm):
    engine = llm.llm_engine
    hints = Hints("m", [{"action_type": "kv.fetch", "payload": {"a": 1}}])
    engine.add_request("0", [70, 71], ONE, session_id="s", prompt_text="as it was", kv_hints=hints)
    request = engine.engine_core.scheduler.requests["0"]
    assert request.session_id == "s"
    assert request.kv_hints == {"message_id": "m", "actions": hints.actions}
    assert finished(engine).prompt == "as it was"
    engine.add_request("1", "a text", ONE)
    request = engine.engine_core.scheduler.requests["1"]
    assert (request.session_id, request.kv_hints) == (None, None)
    assert finished(engine).prompt == "a text"


@pytest.mark.parametrize(
    "fields",
    [{"session_id": 7}, {"prompt_text": ["a"]}, {"kv_hints": object()}, {"kv_hints": {"a": 2**70}}],
    ids=lambda fields: next(iter(fields)),
)
def test_bad_ones(llm, fields):
    with pytest.raises(VLLMValidationError, match=next(iter(fields))):
        llm.llm_engine.add_request("0", [70], ONE, **fields)
    assert not llm.llm_engine.has_unfinished_requests()


def test_transport():
    request = EngineCoreRequest("0", [70], ONE, session_id="s", kv_hints={"actions": [1, "b"]})
    found = decode_request(encode_request(request))
    assert (found.session_id, found.kv_hints) == ("s", {"actions": [1, "b"]})


def test_asynchronous_engines_take_them(server):
    async def last() -> Any:
        fields = {"session_id": "s", "prompt_text": "as it was", "kv_hints": {"actions": []}}
        async for output in server.engine.generate([70, 71], ONE, "own", **fields):
            found = output
        return found

    assert server.run(last()).prompt == "as it was"


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"session_id": "b"}, {}, "b"),
        ({}, {"X-Session-ID": "h"}, "h"),
        ({"session_id": "b"}, {"x-session-id": "h"}, "b"),
        ({"session_id": ""}, {"x-session-id": "h"}, "h"),
        ({"session_id": None}, {}, None),
    ],
)
def test_a_session_comes_by_body_or_header(server, monkeypatch, caplog, body, headers, expected):
    seen, add = [], server.engine.add_checked

    async def add_checked(request_id: str, prompt: Any, *args: Any) -> Any:
        seen.append(prompt.session_id)
        return await add(request_id, prompt, *args)

    monkeypatch.setattr(server.engine, "add_checked", add_checked)
    message = [{"role": "user", "content": "a"}]
    template = "{{ messages[0].content }}"
    for path, own in (
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": message, "chat_template": template}),
    ):
        seen.clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, "vllm.server.serving.generation.sampling"):
            whole = {"model": "tiny", "max_tokens": 1, **own, **body}
            answer = server.request("POST", path, json=whole, headers=headers)
        assert answer.status_code == 200, answer.text
        assert set(seen) == {expected}
        lines = [record.getMessage() for record in caplog.records if "prompt " in record.getMessage()]
        assert lines
        assert all((f"of session {expected!r}" in line) == (expected is not None) for line in lines)


def test_where_reasoning_ends(server):
    """A form binds from the first token on, so that it cannot wait for an end."""
    form = SamplingParams(max_tokens=4, temperature=0, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))

    async def ask(**fields):
        async for output in server.engine.generate("a", form, "form", **fields):
            last = output
        return last.outputs[0].text

    options = {"reasoning_parser_kwargs": {"chat_template_kwargs": {}}}
    found = [server.run(ask(reasoning_ended=ended, **options)) for ended in (None, True)]
    assert found[0] in ("yes", "no") and found[1] == found[0]
    with pytest.raises(VLLMValidationError, match="reasoning_ended must be True or None with structured_outputs"):
        server.run(ask(reasoning_ended=False))


def test_tokenizers_of_asynchronous_engines(server):
    assert server.engine.tokenizer is server.run(server.engine.get_tokenizer())
    message = [{"role": "user", "content": "a"}]
    assert server.engine.tokenizer.apply_chat_template(message, chat_template="b", tokenize=False) == "b"


def test_requests_are_aborted_by_the_cores(server):
    async def aborted() -> list[Any]:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        outputs = []
        async for output in server.engine.generate("a", params, "ends"):
            outputs.append(output)
            await server.engine.engine_core.abort_requests_async(["ends", "unknown"])
        return outputs

    assert len(server.run(aborted())) < 100


def test_configurations(llm, tmp_path):
    config = llm.llm_engine.model_config
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.is_moe, config.uses_mrope, config.get_sliding_window()) == (False, False, None)
    parallel = llm.llm_engine.vllm_config.parallel_config
    raw = config.hf_config.raw
    assert config.get_num_layers(parallel) == raw["num_hidden_layers"]
    assert config.get_num_attention_heads(parallel) == raw["num_attention_heads"]
    assert config.get_num_kv_heads(parallel) == config.get_total_num_kv_heads() == raw["num_key_value_heads"]
    assert config.get_head_size() == raw["hidden_size"] // raw["num_attention_heads"] and not config.use_mla
    assert parallel.rank == parallel.local_rank == 0
    assert config.get_diff_sampling_param() == {}
    assert config.try_get_generation_config()["eos_token_id"] == 2
    assert 16 in get_args(MaxLoRARanks)


def test_prompts_are_made_before_they_are_used(llm):
    (whole,) = llm.generate(["the cat"], ONE, use_tqdm=False)
    made = llm._preprocess_cmpl_one("the cat")
    assert (made["prompt"], made["prompt_token_ids"]) == ("the cat", whole.prompt_token_ids)
    assert llm._preprocess_cmpl_one({"prompt": "the cat", "cache_salt": "s"})["cache_salt"] == "s"
    short = llm._preprocess_cmpl_one("the cat", {"truncate_prompt_tokens": 2})
    assert short["prompt_token_ids"] == whole.prompt_token_ids[-2:]
    (again,) = llm.generate([made], ONE, use_tqdm=False)
    assert again.outputs[0].token_ids == whole.outputs[0].token_ids


def test_a_deleted_executor_is_shut_down(folder):
    before = set(children(os.getpid()))
    engine = make_tiny_llm(folder, tensor_parallel_size=2).llm_engine
    assert set(children(os.getpid())) > before
    del engine.model_executor
    assert set(children(os.getpid())) <= before
