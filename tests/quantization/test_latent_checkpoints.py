"""Quantised models with latent attention: rotated rows change their order, and what widens latents is taken apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import quantized_packing as packing
from quantized_models import Stored, assert_reads, generate, make_llm, make_quantized
from thread_ranks import make_thread_llm
from torch import Tensor

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 32]}
GROUPS = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FIELDS = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
FIELDS |= {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
THREADS = {"max_model_len": 64, "max_logprobs": -1, "skip_tokenizer_init": True}


def of_groups(weight: Tensor) -> Stored:
    return packing.gptq(weight, 4, 32)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("pack", "settings"),
    [(partial(packing.fp8, block=(48, 32)), BLOCKS), (of_groups, GROUPS)],
    ids=["fp8 blocks", "gptq"],
)
def test_readings_are_those_of_the_values(
    pack: Callable[[Tensor], Stored], settings: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    def of_module(name: str, weight: Tensor) -> Stored | None:
        return pack(weight) if "proj" in name else None

    quantized = make_quantized(tmp_path, of_module, settings, "youtu", **FIELDS)
    assert any(name.endswith("kv_b_proj") for name in quantized.names)
    llm = make_llm(tmp_path) if ranks == 1 else make_thread_llm(tmp_path, 2, **THREADS)
    assert_reads(generate(llm), quantized.model)
    if ranks > 1:
        llm.llm_engine.engine_core.executor.shutdown()
