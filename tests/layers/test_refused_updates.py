"""An update that holds one tensor which does not fit changes nothing: neither what came before it, nor any state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models_util import make_random_model, random_prompts
from safetensors.torch import load_file
from tiny_models import make_tiny
from torch import Tensor

from vllm import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False, logprob_token_ids=[3, 7])
LAST = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", "small", tmp_path_factory.mktemp("model"))[0]


def readings(llm: LLM) -> list[np.ndarray]:
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(199, (5, 40))]
    return [output.outputs[0].logprobs.logits.copy() for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


def shifted(folder: Path) -> dict[str, Tensor]:
    return {name: tensor + 0.02 for name, tensor in load_file(folder / "model.safetensors").items()}


def start(folder: Path, **fields: Any) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, dtype="float32", **fields)


def assert_refused(llm: LLM, weights: Any, message: str) -> None:
    worker = llm.llm_engine.engine_core.executor.worker
    before, version = readings(llm), worker.weights_version
    with pytest.raises(ValueError, match=message):
        llm.collective_rpc("update_weights", args=(weights,))
    assert worker.weights_version == version
    for one, other in zip(readings(llm), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("impl", ["vllm", "transformers"])
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.7.mlp.down_proj.weight", torch.zeros(64, 96), "has no weight model.layers.7"),
        (LAST, torch.zeros(64, 95), r"must have shape \(64, 96\), got \(64, 95\)"),
        (LAST, torch.zeros(64, 96, dtype=torch.int32), "must have a floating-point dtype, got torch.int32"),
    ],
    ids=["unknown", "shape", "dtype"],
)
def test_nothing_changes(folder: Path, impl: str, name: str, tensor: Tensor, message: str) -> None:
    llm = start(folder, model_impl=impl)
    weights = [*shifted(folder).items(), (name, tensor)]
    assert_refused(llm, weights, message)
    assert_refused(llm, iter(weights), message)
    # A refused update leaves nothing behind that a further one meets.
    before = readings(llm)
    llm.collective_rpc("update_weights", args=(weights[:-1],))
    assert not np.array_equal(readings(llm)[0], before[0])


def test_an_iterator_that_fails_changes_nothing(folder: Path) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from shifted(folder).items()
        raise ValueError("the trainer is gone")

    assert_refused(start(folder), failing(), "the trainer is gone")


def test_parts_of_merged_experts_do_not_wait_after_a_refusal(tmp_path: Path) -> None:
    make_tiny("qwen3_moe", tmp_path)
    llm = start(tmp_path, model_impl="transformers")
    weights = load_file(tmp_path / "model.safetensors")
    some = next(name for name in weights if ".experts." in name)
    assert_refused(llm, [(some, weights[some] + 1), ("model.norm.weight", torch.zeros(3))], "model.norm.weight")
