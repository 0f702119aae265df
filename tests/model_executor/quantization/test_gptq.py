"""GPTQ checkpoints."""

from __future__ import annotations

import quantized_packing as packing
from quantized_models import assert_reads, generate, make_llm, make_quantized

SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def test_readings_are_those_of_the_dequantised_weights(tmp_path):
    quantized = make_quantized(
        tmp_path, lambda name, weight: packing.gptq(weight) if "proj" in name else None, SETTINGS
    )
    llm = make_llm(quantized.folder)
    assert llm.llm_engine.vllm_config.model_config.quantization == "gptq"
    assert_reads(generate(llm), quantized.model)
