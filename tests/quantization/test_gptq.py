"""GPTQ checkpoints."""

from __future__ import annotations

import numpy as np
import quantized_packing as packing
import torch
from quantized_models import assert_reads, generate, make_llm, make_quantized

SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


def test_groups_that_no_input_has(tmp_path):
    """Scales are of as many groups as the width has, of which g_idx names the first one only."""

    def pack(name, weight):
        if "proj" not in name:
            return None
        stored = packing.gptq(weight, group_size=32, sym=False, order=np.zeros(weight.shape[1], dtype=np.int64))
        for own in ("scales", "qzeros"):
            stored.tensors[own] = stored.tensors[own].repeat(weight.shape[1] // 32, 1)
            stored.tensors[own][1:] += 1
        return stored

    quantized = make_quantized(tmp_path, pack, SETTINGS | {"desc_act": True})
    assert_reads(generate(make_llm(tmp_path)), quantized.model)


def test_a_g_idx_that_nothing_filled(tmp_path):
    def pack(name, weight):
        if "proj" not in name:
            return None
        stored = packing.gptq(weight, group_size=32, sym=False)
        stored.tensors["g_idx"] = torch.zeros_like(stored.tensors["g_idx"])
        return stored

    quantized = make_quantized(tmp_path, pack, SETTINGS)
    assert_reads(generate(make_llm(tmp_path)), quantized.model)


def test_inputs_that_compressed_tensors_did_not_reorder(tmp_path):
    """Its actorder needs a calibration; without, all of weight_g_idx is -1."""

    def pack(name, weight):
        if "proj" not in name:
            return None
        stored = packing.pack_quantized(weight)
        stored.tensors["weight_g_idx"] = torch.full((weight.shape[1],), -1, dtype=torch.int32)
        return stored

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | {"actorder": "group"}}},
        "ignore": ["lm_head"],
    }
    quantized = make_quantized(tmp_path, pack, settings)
    assert_reads(generate(make_llm(tmp_path)), quantized.model)
