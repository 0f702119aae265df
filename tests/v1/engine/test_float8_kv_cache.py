"""kv_cache_dtype="fp8": readings are those of a model whose keys and values are rounded, whatever happens to blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models_util import make_random_model, random_prompts
from pretend_cuda import pretending
from readings_reference import assert_matches, own_logits, reference_logits
from safetensors.torch import load_file, save_file
from thread_ranks import make_thread_llm
from tiny_llm import make_tiny_llm
from torch import Tensor

from vllm import LLM, EngineArgs, SamplingParams
from vllm.ops._dispatch import implementation
from vllm.ops.kv_cache import as_cached

SCALES = {0: (0.02, 0.5), 1: (1.7, 0.03)}
"""k_scale and v_scale of each layer."""
PARAMS = SamplingParams(
    temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, logprob_token_ids=[5, 90], prompt_logprobs=2
)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint with scales, by two of their names, and transformers' model."""
    folder, model = make_random_model("llama", "small", tmp_path_factory.mktemp("scaled"))
    tensors = load_file(folder / "model.safetensors")
    for layer, (k_scale, v_scale) in SCALES.items():
        before = ("k_proj.", "v_proj.") if layer else ("", "")
        for name, value in zip("kv", (k_scale, v_scale), strict=True):
            own = f"model.layers.{layer}.self_attn.{before[name == 'v']}{name}_scale"
            tensors[own] = torch.tensor(value if layer else [value])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, model


@pytest.fixture
def rounding(request: pytest.FixtureRequest) -> Iterator[tuple[torch.dtype, dict[int, tuple[float, float]]]]:
    """transformers' attention "rounded", which rounds keys and values, and what it rounds to."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    float8, scales = request.param

    def rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = scales.get(module.layer_idx, (1.0, 1.0))
        key, value = (as_cached(x, float8, scale).float() * scale for x, scale in zip((key, value), own, strict=True))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("rounded", rounded)
    ALL_MASK_ATTENTION_FUNCTIONS.register("rounded", sdpa_mask)
    yield float8, scales
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        functions._global_mapping.pop("rounded")


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("fp8", (torch.float8_e4m3fn, SCALES)),
        ("fp8_e4m3", (torch.float8_e4m3fn, SCALES)),
        ("fp8_e5m2", (torch.float8_e5m2, SCALES)),
    ],
    indirect=["rounding"],
)
def test_readings_are_those_of_rounded_keys_and_values(name: str, rounding: Any, scaled: Any) -> None:
    folder, model = scaled
    llm = make_tiny_llm(folder, kv_cache_dtype=name, skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(llm.llm_engine.model_config.vocab_size)]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    own = own_logits(llm, outputs)
    model.set_attn_implementation("rounded")
    for output, logits in zip(outputs, own, strict=True):
        assert_matches(output, PARAMS, reference_logits(model, output), logits)
    # Without rounding they are others, so that this is no test of nothing.
    model.set_attn_implementation("sdpa")
    assert max(abs(reference_logits(model, out) - row).max() for out, row in zip(outputs, own, strict=True)) > 1e-2


def read(llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[tuple[Any, Tensor]]:
    """Tokens and their logprobs."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [(out.outputs[0].token_ids, torch.from_numpy(out.outputs[0].logprobs.logprobs)) for out in outputs]


def assert_same(ours: list[tuple[Any, Tensor]], others: list[tuple[Any, Tensor]], is_exact: bool = False) -> None:
    """To the bit, or to the roundings of sums in another order: PyTorch's follows the batch."""
    is_exact = is_exact and implementation(torch.empty(0)) == "cpp"
    for (ids, own), (other_ids, other) in zip(ours, others, strict=True):
        assert ids == other_ids
        torch.testing.assert_close(own, other, rtol=0, atol=0 if is_exact else 2e-4)


PROMPTS = [[5] * 20 + [3 + index] * (4 + 9 * index) for index in range(6)]


def test_blocks_that_are_shared_swapped_or_computed_again_give_the_same_bits(folder: Path) -> None:
    plain = make_tiny_llm(folder, kv_cache_dtype="fp8", enable_prefix_caching=False)
    wanted = read(plain, PROMPTS)
    for fields in ({}, {"num_gpu_blocks_override": 12}):
        llm = make_tiny_llm(folder, kv_cache_dtype="fp8", **fields)
        for _ in range(2):
            assert_same(read(llm, PROMPTS), wanted, is_exact=True)
    swapping = make_tiny_llm(folder, kv_cache_dtype="fp8", num_gpu_blocks_override=8, swap_space=1e-3)
    # Positions of prompts that are read would be computed again.
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    for prompt in ([7] * 100, [9] * 100, [7] * 100):
        assert_same(read(swapping, [prompt], params), read(plain, [prompt], params), is_exact=True)
    assert swapping.llm_engine.engine_core.stats()["num_swapped_in_blocks"] == 5


def test_ranks_read_what_one_does(scaled: Any) -> None:
    folder, _ = scaled
    fields = {"kv_cache_dtype": "fp8", "skip_tokenizer_init": True}
    alone, together = make_tiny_llm(folder, **fields), make_thread_llm(folder, 2, **fields)
    assert_same(read(together, PROMPTS), read(alone, PROMPTS))
    together.llm_engine.engine_core.executor.shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")
def test_graphs_on_a_pretended_device_give_the_same(folder: Path) -> None:
    plain = read(make_tiny_llm(folder, kv_cache_dtype="fp8"), PROMPTS)
    with pretending():
        there = read(make_tiny_llm(folder, kv_cache_dtype="fp8", device="cuda", max_num_seqs=4), PROMPTS)
    assert_same(there, plain)


def test_twice_the_blocks_fit(folder: Path) -> None:
    counts = {}
    for dtype in ("auto", "float32", "fp8"):
        llm = make_tiny_llm(folder, kv_cache_dtype=dtype, kv_cache_memory_bytes=2**20, enable_prefix_caching=False)
        counts[dtype] = llm.llm_engine.engine_core.scheduler.kv.pool.num_blocks
        (k_cache, _), *_ = llm.llm_engine.engine_core.executor.worker.model_runner.kv_caches
        assert k_cache.dtype == (torch.float8_e4m3fn if dtype == "fp8" else torch.float32)
    assert counts["auto"] == counts["float32"] and math.isclose(counts["fp8"], 4 * counts["auto"], rel_tol=0.01)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be auto, fp8, .*got 'int8'"),
        ({"kv_cache_dtype": "bfloat16"}, r"or the model's dtype \(float32\), got 'bfloat16'"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "kv_cache_dtype_skip_layers"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales.*the checkpoint's, or 1"),
    ],
)
def test_what_there_is_not_is_refused(folder: Path, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        EngineArgs(str(folder), dtype="float32", **fields).create_engine_config()


def test_scales_that_are_none_are_refused(scaled: Any, tmp_path: Path) -> None:
    folder, _ = scaled
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([-1.0])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.k_scale must be positive, got -1"):
        make_tiny_llm(tmp_path, skip_tokenizer_init=True)
