"""load_format="dummy": a model of config.json alone, the same for everyone who knows the seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models_util import ARCHITECTURES, hf_logits, load_model, make_hf_model, paged_logits, random_prompts

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.layers.dummy_weights import dummy_weight
from vllm.layers.sharding import Shard, WeightSlot
from vllm.loader import weights


def save_config(model: Any, folder: Path) -> Path:
    """config.json, and nothing else."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_config(make_hf_model("qwen3"), tmp_path)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_with_the_same_noise_computes_the_same(arch: str, tmp_path: Path) -> None:
    theirs = make_hf_model(arch)
    save_config(theirs, tmp_path)
    ours, config = load_model(tmp_path, load_format="dummy", seed=3)
    for name, parameter in theirs.named_parameters():
        ((own_name, _),) = ours.checkpoint_tensors(name, parameter)
        parameter.data = dummy_weight(own_name, tuple(parameter.shape), torch.float32, "cpu", seed=3)
    prompts = random_prompts(config.vocab_size, (5, 20))
    for got, want in zip(paged_logits(ours, config, prompts), hf_logits(theirs, prompts), strict=True):
        assert want.std() > 0.05, "logits that are all alike would prove nothing"
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_a_rank_holds_its_part_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    part = WeightSlot(torch.empty(3, 4), (Shard(9, range(3, 6)), Shard.whole(4)))
    monkeypatch.setattr(weights, "checkpoint_slots", lambda model: {"some.weight": part})
    weights.fill_with_noise(torch.nn.Module(), seed=5)
    whole = dummy_weight("some.weight", (9, 4), torch.float32, "cpu", seed=5)
    assert torch.equal(part.target, whole[3:6])


def test_scales_are_near_one_and_every_name_has_its_own_numbers() -> None:
    matrix, scale, bias = (
        dummy_weight(name, shape, torch.bfloat16, "cpu", 0)
        for name, shape in (("a.weight", (64, 64)), ("a.weight", (4096,)), ("a.bias", (4096,)))
    )
    for values, mean in ((matrix, 0), (scale, 1), (bias, 0)):
        assert values.dtype == torch.bfloat16
        # The mean of 4,096 draws is off by 0.02 / 64, and bfloat16 near 1 by half of 2 ** -8 at most.
        assert values.float().mean().item() == pytest.approx(mean, abs=0.0025)
        assert values.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(bias, dummy_weight("b.bias", (4096,), torch.bfloat16, "cpu", 0))
    assert not torch.equal(bias, dummy_weight("a.bias", (4096,), torch.bfloat16, "cpu", 1))


def test_an_engine_needs_no_weights_and_no_tokenizer(folder: Path) -> None:
    def read(seed: int) -> list[float]:
        llm = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, max_logprobs=-1, seed=seed)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1)
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        return output.outputs[0].logprobs.logits.tolist()

    assert read(1) == read(1) != read(2)


def test_without_it_the_weights_are_missed(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"neither model\.safetensors"):
        LLM(str(folder), skip_tokenizer_init=True)


def test_other_formats_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"^load_format must be one of auto, dummy, safetensors, hf, gguf, pt, bitsandbytes, got 'npcache'$",
    ):
        EngineArgs(str(folder), load_format="npcache").create_engine_config()
    config = EngineArgs(str(folder), load_format="dummy").create_engine_config().model_config
    with pytest.raises(ValueError, match=r"^load_format must be one of auto, dummy, got None$"):
        replace(config, load_format=None)
