"""VLLM_ALLOW_LONG_MAX_MODEL_LEN: a context beyond the configuration's, where positions are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny, reference

from vllm import LLM, SamplingParams

TRAINED, ASKED = 32, 96


def load(folder: Path) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=ASKED, num_gpu_blocks_override=16)


def test_rotary_positions_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama", tmp_path, max_position_embeddings=TRAINED)
    with pytest.raises(ValueError, match=f"at most .*={TRAINED}, got {ASKED}; VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"):
        load(tmp_path)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    ids = torch.arange(3, ASKED - 1).remainder(model.config.vocab_size).tolist()
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = load(tmp_path).generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    found = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True) if row]
    expected = reference(model, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


def test_learned_positions_are_those_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    for kind, name in (("gpt2", "n_positions"), ("opt", "max_position_embeddings")):
        make_tiny(kind, tmp_path / kind, **{name: TRAINED})
        with pytest.raises(ValueError, match="max_position_embeddings=32|embed_positions"):
            load(tmp_path / kind)
