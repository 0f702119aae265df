"""Pictures in prompts: every family's readings equal transformers', whatever else happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tiny_vision import FAMILIES, Reference, draw, make_vision_model

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
IDS = [5, 17, 64, 100]


class Tiny(NamedTuple):
    name: str
    folder: Path
    reference: Reference

    def prompt(self, text: str, *pictures: Any, **others: Any) -> dict[str, Any]:
        """`text` with {} where a picture goes."""
        text = text.replace("{}", FAMILIES[self.name].placeholder)
        return {"prompt": text, "multi_modal_data": {"image": list(pictures)}, **others}

    def llm(self, **fields: Any) -> LLM:
        usual = {"dtype": "float32", "max_model_len": 400, "max_logprobs": -1, "max_num_seqs": 8}
        return LLM(str(self.folder), **{**usual, **fields})


def make_tiny(name: str, folder: Path) -> Tiny:
    return Tiny(name, folder, Reference(*make_vision_model(name, folder), name))


def reading(**fields: Any) -> SamplingParams:
    usual = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprob_token_ids": IDS, "prompt_logprobs": 0}
    return SamplingParams(**{**usual, **fields})


def generate(llm: LLM, prompts: list[Any], params: Any = None) -> list[Any]:
    return llm.generate(prompts, params or reading(), use_tqdm=False)


def check(tiny: Tiny, prompt: dict[str, Any], output: Any) -> None:
    """Every position's readings, ranks and greedy tokens."""
    (completion,) = output.outputs
    ids, tokens = list(output.prompt_token_ids), list(completion.token_ids)
    want_ids, values = tiny.reference.processed(prompt["prompt"], prompt["multi_modal_data"]["image"])
    assert ids == want_ids
    want = tiny.reference.logprobs(ids + tokens, values)
    assert want.std() > 0.3, "logits that are all alike would prove nothing"
    rows = [*(output.prompt_logprobs or [None])[1:], *completion.logprobs]
    first = len(want) - 1 - len(rows)
    for row, entries in zip(want[first:], rows, strict=False):
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(row[token], abs=TOLERANCE)
            above, beside = (row > row[token] + TOLERANCE).sum(), (abs(row - row[token]) <= TOLERANCE).sum()
            assert above + 1 <= entry.rank <= above + beside
    for step, (token, entries) in enumerate(zip(tokens, completion.logprobs, strict=True)):
        row = want[len(ids) - 1 + step]
        assert {*IDS, token} <= set(entries) and row[token] == pytest.approx(row.max(), abs=TOLERANCE)


PICTURES = [draw(40, 30, 1), draw(64, 24, 2), draw(20, 50, 3)]


@pytest.mark.parametrize("name", FAMILIES)
def test_readings_equal_transformers(name: str, tmp_path: Path) -> None:
    tiny = make_tiny(name, tmp_path)
    prompts = [
        tiny.prompt("plain text"),
        tiny.prompt("look {} here", PICTURES[0]),
        tiny.prompt("{} and {}, then {}: which", *PICTURES),
        tiny.prompt("other words {} here", PICTURES[0]),
    ]
    # The second call's prefixes come from the cache, the first one's are cut within pictures.
    # PaliGemma's prompts are computed in one step.
    llm = tiny.llm(max_num_batched_tokens=160 if name == "paligemma" else 32)
    for _ in range(2):
        for prompt, output in zip(prompts, generate(llm, prompts), strict=True):
            check(tiny, prompt, output)
    # Another picture in the same place is another content.
    other = tiny.prompt("look {} here", PICTURES[1])
    outputs = generate(llm, [prompts[1], other])
    check(tiny, other, outputs[1])
    readings = [np.array([out.outputs[0].logprobs[0][token].logprob for token in IDS]) for out in outputs]
    assert abs(readings[0] - readings[1]).max() > 10 * TOLERANCE
