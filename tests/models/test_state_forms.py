"""Recurrent models under a form: the states follow tokens that are appended together."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import make_architecture
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from tiny_llm import is_empty, make_tiny_llm

from vllm import SamplingParams
from vllm.v1.features.grammars import runner as grammar

pytest.importorskip("llguidance")


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_a_run_is_as_its_tokens_one_by_one(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_architecture(name, tmp_path, vocab_size=VOCAB_SIZE)
    make_byte_tokenizer(tmp_path)
    llm = make_tiny_llm(tmp_path)
    form = {"regex": "the answer is ([0-9]{3}|none), (yes|no) indeed"}
    params = SamplingParams(temperature=1, seed=2, n=2, max_tokens=60, logprobs=2, structured_outputs=form)
    (found,) = llm.generate(["hello"], params, use_tqdm=False)
    monkeypatch.setattr(grammar, "_takes_runs", lambda params: False)
    (expected,) = llm.generate(["hello"], params, use_tqdm=False)
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, "stop")
        assert one.logprobs.logprobs.tolist() == pytest.approx(other.logprobs.logprobs.tolist(), abs=1e-5)
        assert one.logprobs.ranks.tolist() == other.logprobs.ranks.tolist()
    assert is_empty(llm)
