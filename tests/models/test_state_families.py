"""Families with recurrent states: prompts of every length, in chunks, over two ranks, and in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import make_architecture
from test_state_models import (
    assert_equal_bits,
    assert_near_transformers,
    make_llm,
    random_prompts,
    rounding_errors,
    run,
)
from thread_ranks import make_thread_llm

pytestmark = pytest.mark.usefixtures("one_thread")

# One family for each kind of state.
FAMILIES = (
    *("qwen3_5", "granite_hybrid", "nemotron_h", "jamba", "mamba2", "kimi_linear", "falcon_h1"),
    *("rwkv", "xlstm", "zamba", "zamba2"),
)
# Fewer than a convolution takes, one more than a tile of tokens, and many.
LENGTHS = (1, 2, 3, 65, 300)
# Over more layers, and so many tokens, float32 itself is off by more than is allowed, transformers' too.
_TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    fields = _TWO_LAYERS if request.param == "qwen3_5" else {}
    return folder, make_architecture(request.param, folder, max_position_embeddings=512, **fields)


def test_prompts_of_all_lengths(model: tuple[Path, Any]) -> None:
    folder, hf_model = model
    prompts = random_prompts(LENGTHS)
    whole = run(make_llm(folder, max_model_len=400, enable_prefix_caching=False), prompts)
    assert_near_transformers(hf_model, prompts, whole)
    chunked = make_llm(folder, max_model_len=400, enable_prefix_caching=False, max_num_batched_tokens=61)
    in_chunks = run(chunked, prompts)
    if hf_model.config.model_type == "kimi_linear":
        # Latent attention of long chunks sums in another order than that of short ones.
        assert_near_transformers(hf_model, prompts, in_chunks)
    else:
        assert_equal_bits(in_chunks, whole)


_SPLIT = ["qwen3_5", "kimi_linear", "falcon_h1", "jamba", "granite_hybrid-dense", "minimax", "rwkv", "xlstm"]


@pytest.mark.parametrize("model", [*_SPLIT, "zamba", "zamba2"], indirect=True)
def test_two_ranks(model: tuple[Path, Any]) -> None:
    folder, hf_model = model
    prompts = random_prompts((1, 3, 65))
    llm = make_thread_llm(folder, 2, max_model_len=128, skip_tokenizer_init=True)
    assert_near_transformers(hf_model, prompts, run(llm, prompts))


def test_bfloat16_is_as_near_as_transformers(tmp_path: Path) -> None:
    """Together, since a token's rounding decides much in a small model: which experts it takes, for one."""
    errors = []
    for name in ("qwen3_5", "olmo_hybrid", "bamba", "mamba", "mamba2", "falcon_h1"):
        hf_model = make_architecture(name, tmp_path / name, max_position_embeddings=512)
        errors.append(rounding_errors(tmp_path / name, hf_model, random_prompts((120, 31), seed=8)))
    ours, theirs = np.array(errors).T
    assert (ours / theirs).mean() <= 1.1, f"{ours} against {theirs}"


def test_rwkv_reads_as_if_its_stream_were_halved(tmp_path: Path) -> None:
    # transformers' model halves its weights in place, so that no family's usual tests can run it twice.
    hf_model = make_architecture("rwkv", tmp_path, num_hidden_layers=5, rescale_every=2)
    prompts = random_prompts((1, 40))
    assert_near_transformers(hf_model, prompts, run(make_llm(tmp_path, max_model_len=64), prompts))
