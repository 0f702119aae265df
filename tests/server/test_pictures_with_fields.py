"""Fields of requests beside pictures: prompt readings, grammars, tools, beams and adapters by transformers' numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi import AppThread, Serve
from pictures import data_url, drawn
from tiny_adapters import make_adapter, merged
from tiny_vision import Reference, make_chat_model

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams

pytestmark = pytest.mark.usefixtures("one_thread")

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGE = drawn(40, 30, 1)
TEXT = f"user:see{PLACE}there>"
CHATS = "/v1/chat/completions"
FIELDS = {"max_model_len": 300, "max_logprobs": -1, "max_num_seqs": 8, "enable_lora": True, "max_lora_rank": 8}
MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "see"},
            {"type": "image_url", "image_url": {"url": data_url(IMAGE)}},
            {"type": "text", "text": "there"},
        ],
    }
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder, transformers' model and its tokenizer."""
    folder = tmp_path_factory.mktemp("vision")
    model, tokenizer = make_chat_model("qwen3_vl", folder, ">")
    return folder, model, tokenizer


@pytest.fixture(scope="module")
def reference(tiny):
    """Logprobs [T, V] of the prompt and further ids, and how many the prompt has."""

    def logprobs(more=(), model=None):
        whole = Reference(model or tiny[1], tiny[2], "qwen3_vl")
        ids, values = whole.processed(TEXT, [IMAGE])
        return whole.logprobs([*ids, *more], values), ids

    return logprobs


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    """An adapter of the text decoder's attention."""
    return make_adapter(tmp_path_factory.mktemp("adapter"), tiny[1], targets=("q_proj", "v_proj"))


@pytest.fixture(scope="module")
def server(serve: Serve, tiny: Any, adapter: Path) -> AppThread:
    app = serve(FIELDS, tiny[0], enable_auto_tool_choice=True, tool_call_parser="hermes")
    app.run(app.state.adapters.load(app.engine, ["tiny"], "own", str(adapter)))
    return app


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(str(tiny[0]), dtype="float32", **FIELDS)


def post(server, **body):
    return server.post(CHATS, messages=MESSAGES, temperature=0, **body)


def prompt():
    return {"prompt": TEXT, "multi_modal_data": {"image": IMAGE}}


def test_prompt_logprobs(server, reference):
    rows, ids = reference()
    answer = post(server, max_tokens=1, prompt_logprobs=2, prompt_logprob_token_ids=[70, 80])
    found = answer["prompt_logprobs"]
    assert len(found) == len(ids) and found[0] is None
    for row, token, entries in zip(rows, ids[1:], found[1:], strict=False):
        assert {70, 80, token} <= {int(key) for key in entries}
        for key, entry in entries.items():
            assert entry["logprob"] == pytest.approx(row[int(key)], abs=1e-4)


def test_a_teachers_readings(llm, reference):
    """Other ids at each position, from the first one after the picture on."""
    rows, ids = reference()
    start = len(ids) - 6
    asked = [[70 + place, 90 + place] for place in range(5)]
    params = SamplingParams(
        max_tokens=0, prompt_logprob_token_ids=asked, prompt_logprob_start=start, logprob_entropy=True
    )
    (output,) = llm.generate([prompt()], params, use_tqdm=False)
    for place, wanted in enumerate(asked):
        entries = output.prompt_logprobs[start + 1 + place]
        for token in wanted:
            assert entries[token].logprob == pytest.approx(rows[start + place][token], abs=1e-4)


def test_grammars(server, reference):
    choices = ["ab", "b"]
    body = {"structured_outputs": {"choice": choices}, "choice_readings": True, "max_tokens": 4}
    (choice,) = post(server, **body)["choices"]
    assert choice["message"]["content"] in choices
    want = {}
    for text in choices:
        tokens = server.engine.input_processor.tokenizer.encode(text, add_special_tokens=False)
        rows, ids = reference(tokens)
        want[text] = sum(float(rows[len(ids) - 1 + place][token]) for place, token in enumerate(tokens))
    found = {each["text"]: each["logprob"] for each in choice["choice_readings"]}
    assert found == pytest.approx(want, abs=1e-4)


def test_a_tool_is_called(server):
    schema = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]}
    tools = [{"type": "function", "function": {"name": "name_it", "parameters": schema}}]
    (choice,) = post(server, tools=tools, tool_choice="required", max_tokens=100)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "name_it"
    assert json.loads(call["function"]["arguments"])["kind"] in ("cat", "dog")


def test_beams(server, llm, tiny, reference):
    (beams,) = llm.beam_search(
        [prompt()], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    _, ids = reference()
    own = [list(sequence.tokens)[-4:] for sequence in beams.sequences]
    # transformers takes a placeholder that was generated for a picture.
    usable = [tokens for tokens in own if tiny[1].config.image_token_id not in tokens]
    assert usable
    for sequence, tokens in zip(beams.sequences, own, strict=True):
        if tokens not in usable:
            continue
        rows, _ = reference(tokens)
        want = sum(float(rows[len(ids) - 1 + place][token]) for place, token in enumerate(tokens))
        assert sequence.cum_logprob == pytest.approx(want, abs=1e-3)
    answer = post(server, use_beam_search=True, n=3, max_tokens=4, ignore_eos=True)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    tokenizer = llm.get_tokenizer()
    assert texts == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in own]


def test_adapters(server, llm, adapter, tiny, reference):
    changed, _ = reference(model=merged(tiny[1], adapter))
    plain, _ = reference()
    assert abs(changed[-1] - plain[-1]).max() > 0.01
    params = SamplingParams(max_tokens=1, logprob_token_ids=[70, 80])
    requests = [None, LoRARequest("own", 1, str(adapter))]
    outputs = llm.generate([prompt()] * 2, params, lora_request=requests, use_tqdm=False)
    for output, row in zip(outputs, (plain[-1], changed[-1]), strict=True):
        entries = output.outputs[0].logprobs[0]
        assert [entries[token].logprob for token in (70, 80)] == pytest.approx(row[[70, 80]].tolist(), abs=1e-4)
    for name, row in (("own", changed[-1]), ("tiny", plain[-1])):
        (choice,) = post(server, model=name, max_tokens=1, logprob_token_ids=[70, 80])["choices"]
        (entry,) = choice["logprobs"]["content"]
        found = {each["token_id"]: each["logprob"] for each in entry["top_logprobs"]}
        np.testing.assert_allclose([found[70], found[80]], row[[70, 80]], atol=1e-4)


def test_adapters_of_towers_are_refused(llm, tiny, tmp_path):
    both = make_adapter(tmp_path, tiny[1], targets=("q_proj", "fc1", "linear_fc1"))
    with pytest.raises(ValueError, match=r"visual\.blocks\..* is a part of the picture tower"):
        llm.generate([prompt()], SamplingParams(max_tokens=1), lora_request=LoRARequest("b", 7, str(both)))
