"""Every architecture's logits against transformers, float32, over ragged batches and chunked prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_util import (
    ARCHITECTURES,
    SIZES,
    hf_logits,
    load_model,
    make_hf_model,
    make_random_model,
    paged_logits,
    random_prompts,
)

TOLERANCE = 1e-4


def check_against_transformers(folder: Path, hf_model: Any, device: str) -> None:
    model, config = load_model(folder, device=device)
    prompts = random_prompts(config.vocab_size)
    expected = hf_logits(hf_model, prompts)
    for chunk in (1, 7, None):
        for got, want in zip(paged_logits(model, config, prompts, chunk, device=device), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
        last = paged_logits(model, config, prompts, chunk, last_only=True, device=device)
        for got, want in zip(last, expected, strict=True):
            torch.testing.assert_close(got, want[-1:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_equal_transformers(arch: str, size: str, tmp_path: Path, device: str) -> None:
    check_against_transformers(*make_random_model(arch, size, tmp_path), device)


@pytest.mark.parametrize(
    "overrides",
    [
        {"do_layer_norm_before": False, "word_embed_proj_dim": 64},
        {"word_embed_proj_dim": 32},
        {"enable_bias": False},
        {"layer_norm_elementwise_affine": False},
        {"_remove_final_layer_norm": True},
        {"activation_function": "gelu"},
    ],
    ids=lambda overrides: "-".join(overrides),
)
def test_opt_variants(overrides: dict[str, Any], tmp_path: Path, device: str) -> None:
    check_against_transformers(*make_random_model("opt", "small", tmp_path, **overrides), device)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "opt"])
def test_tied_and_untied(arch: str, tmp_path: Path, device: str) -> None:
    for tied in (True, False):
        folder, hf_model = make_random_model(arch, "small", tmp_path / str(tied), tie_word_embeddings=tied)
        check_against_transformers(folder, hf_model, device)


ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e3,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn-tuned": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_scalings(name: str, tmp_path: Path, device: str) -> None:
    folder, hf_model = make_random_model("llama", "small", tmp_path, rope_parameters=dict(ROPES[name]))
    model, config = load_model(folder, device=device)
    prompts = random_prompts(config.vocab_size, (200, 3))
    got = paged_logits(model, config, prompts, device=device)
    for mine, theirs in zip(got, hf_logits(hf_model, prompts), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precisions_stay_near(dtype: str, tmp_path: Path, device: str) -> None:
    folder, hf_model = make_random_model("llama", "odd", tmp_path)
    model, config = load_model(folder, dtype, device)
    prompts = random_prompts(config.vocab_size)
    half = make_hf_model("llama", "odd").to(getattr(torch, dtype))
    for mine, half_theirs, truth in zip(
        paged_logits(model, config, prompts, 7, dtype=dtype, device=device),
        hf_logits(half, prompts),
        hf_logits(hf_model, prompts),
        strict=True,
    ):
        assert mine.dtype in (getattr(torch, dtype), torch.float32)
        my_error, their_error = (mine.float() - truth).abs().max(), (half_theirs.float() - truth).abs().max()
        assert my_error <= 1.5 * their_error + 1e-3


def test_a_step_without_logits_rows_writes_the_cache_only(tmp_path: Path, device: str) -> None:
    folder, hf_model = make_random_model("qwen3", "odd", tmp_path)
    model, config = load_model(folder, device=device)
    prompts = random_prompts(config.vocab_size, (30,))
    # With chunks of 7 only the last of five steps has a row to compute.
    (got,) = paged_logits(model, config, prompts, 7, last_only=True, device=device)
    torch.testing.assert_close(got, hf_logits(hf_model, prompts)[0][-1:], rtol=0, atol=TOLERANCE)
