"""Whatever an architecture's layers hold, its packed weights on disk are those that it would pack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from architectures import make_architecture
from packed_starts import check_starts, files, is_mapped, needs_kernels, packed, state  # noqa: F401 - a fixture
from thread_stages import make_staged_llm

from vllm.ops._dispatch import ISA_LEVELS, cpu_ops

pytestmark = needs_kernels

# One of each kind of layers: biases, norms that are products, tied and untied heads, latent attention, experts of all
# kinds, and each recurrent state.
NAMES = (
    "llama",
    "qwen2",
    "opt",
    "gpt2",
    "bloom",
    "falcon",
    "phi3",
    "gemma4",
    "deepseek_v3",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "nemotron_h-mixture",
    "qwen3_5_moe",
    "lfm2_moe",
    "mamba2",
    "xlstm",
    "rwkv",
    "zamba2",
)


@pytest.mark.parametrize("name", NAMES)
def test_starts_have_the_same_bits(name: str, tmp_path: Path, packed: Path) -> None:  # noqa: F811
    make_architecture(name, tmp_path / "model")
    check_starts(tmp_path / "model", dtype="bfloat16")
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(packed))


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_weights_rounded_at_load_have_the_same_bits(
    name: str,
    quantization: str,
    tmp_path: Path,
    packed: Path,  # noqa: F811
) -> None:
    make_architecture(name, tmp_path / "model")
    check_starts(tmp_path / "model", quantization=quantization, dtype="bfloat16")


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_transformers_modules_have_the_same_bits(model_impl: str, tmp_path: Path, packed: Path) -> None:  # noqa: F811
    make_architecture("qwen3", tmp_path / "model")
    check_starts(tmp_path / "model", model_impl=model_impl)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_each_stage_has_its_own(name: str, tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    make_architecture(name, tmp_path / "model")

    def states() -> list[tuple[bool, list[tuple[Any, ...]]]]:
        staged = make_staged_llm(tmp_path / "model", 2, skip_tokenizer_init=True, max_model_len=64)
        models = [worker.get_model() for worker in staged.llm_engine.engine_core.executor.workers]
        staged.llm_engine.engine_core.shutdown()
        return [(is_mapped(model), state(model)) for model in models]

    with monkeypatch.context() as patch:
        patch.setenv("VLLM_PACKED_CACHE", "0")
        plain = [own for _, own in states()]
    # Written, then mapped; other shares of the layers have other files.
    for partition, count in (("2,2", 2), ("2,2", 2), ("1,3", 4)):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        found = states()
        assert all(is_there for is_there, _ in found) and len(files(packed)) == count
        assert (found == [(True, own) for own in plain]) is (partition == "2,2")


@pytest.mark.parametrize("level", ISA_LEVELS[:3])
def test_each_level_has_its_own(level: str, tmp_path: Path, packed: Path) -> None:  # noqa: F811
    ops = cpu_ops()
    assert ops is not None
    make_architecture("llama", tmp_path / "model")
    check_starts(tmp_path / "model", dtype="bfloat16")
    widest = ops.set_isa(-1)
    try:
        if ops.set_isa(ISA_LEVELS.index(level)) != ISA_LEVELS.index(level) or ISA_LEVELS.index(level) == widest:
            pytest.skip(f"the kernels have no {level} below the widest level")
        check_starts(tmp_path / "model", dtype="bfloat16")
    finally:
        ops.set_isa(widest)
    assert len(files(packed)) == 2
