"""GPTQ checkpoints, as AutoGPTQ, GPTQModel, AutoRound and Optimum write them.

A module with weight [N, K] of b bits in groups of g inputs has
- qweight: int32 [K b / 32, N], the codes of each output down a column of words, low bits first;
- qzeros: int32 [K / g, N b / 32], the code that means 0 of each group and output, less one in the format "gptq", as
  it is in "gptq_v2";
- scales: [K / g, N];
- g_idx: int32 [K], the group of each input, where inputs were quantised in the order of their activations (desc_act).
W[n, k] = scale * (code - zero).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.quantization.bits import unpack
from vllm.quantization.groups import (
    as_zero_points,
    check_group_size,
    group_reason,
    num_groups,
    sort_groups,
)
from vllm.quantization.setting_values import check_pattern, read_flag, read_objects
from vllm.quantization.stored import FLOATS, StoredConfig, StoredTensors, WeightFormat
from vllm.quantization.weight import QuantizedWeight

_BITS = (2, 3, 4, 8)
_FORMATS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class _Settings:
    bits: int
    group_size: int
    desc_act: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> _Settings:
        bits = config.get("bits")
        if bits not in _BITS or isinstance(bits, bool):
            raise ValueError(f"bits must be one of {', '.join(map(str, _BITS))}, got {bits!r}")
        read_flag(config, "sym", True)  # the tensors tell
        return cls(bits, check_group_size(config.get("group_size", 128)), read_flag(config, "desc_act", False))


def _expression(pattern: str) -> str:
    return pattern.removeprefix("-:").removeprefix("+:")


class GPTQConfig(StoredConfig):
    """See the module."""

    name = "gptq"
    files = ("quantize_config.json",)
    settings = """
        act_group_aware adapter backend base_model_name_or_path batch_size bits block_name_to_quantize
        cache_block_outputs checkpoint_format damp_auto_increment damp_percent dataset desc_act device disable_exllama
        dynamic exllama_config fail_safe format group_size hyb_act is_marlin_format lm_head max_input_length meta
        model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
        modules_in_block_to_quantize mse pack_dtype pad_token_id parallel_packing quantizer static_groups sym
        task_type tokenizer true_sequential uri use_cuda_fp16 use_exllama v2 version
    """
    names = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._config = config
        self._settings = _Settings.of(config)
        name = config.get("checkpoint_format") or config.get("format") or "gptq"
        if config.get("is_marlin_format"):
            raise ValueError("is_marlin_format must be false: convert the checkpoint with GPTQModel")
        if not isinstance(name, str) or name not in _FORMATS:
            raise ValueError(
                f"checkpoint_format must be gptq or gptq_v2, got {name!r}: convert the checkpoint with GPTQModel"
            )
        if config.get("pack_dtype", "int32") not in ("int32", None):
            raise ValueError(f"pack_dtype must be int32, got {config['pack_dtype']!r}")
        if config.get("adapter"):
            raise ValueError("adapter is not implemented: its low-rank corrections are no tensors of the checkpoint")
        self._zero_offset = _FORMATS[name]
        # Patterns of modules with settings of their own; "-:" begins those that are not quantised.
        self._dynamic = read_objects(config, "dynamic")
        for pattern, changes in self._dynamic.items():
            check_pattern("dynamic", _expression(pattern))
            if not pattern.startswith("-:"):
                _Settings.of(config | changes)

    @staticmethod
    def wrote(settings: dict[str, Any]) -> bool:
        return {"bits", "group_size"} <= settings.keys() and settings.keys().isdisjoint(
            {"wbits", "w_bit", "zero_point"}
        )

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        settings = self._settings
        for pattern, changes in self._dynamic.items():
            if re.match(_expression(pattern), module) is None:
                continue
            if pattern.startswith("-:"):
                raise ValueError(f"quantization_config's dynamic {pattern!r} excludes it, but it is quantised")
            settings = _Settings.of(self._config | changes)
            break
        return WeightFormat(("qweight", "qzeros", "scales"), ("g_idx",), partial(self._read, settings=settings))

    def _read(self, stored: StoredTensors, settings: _Settings) -> QuantizedWeight:
        bits = settings.bits
        words = stored.take("qweight", torch.int32, None, None)
        if words.shape[0] % (bits if bits == 3 else 1):
            raise stored.error("qweight", f"has {words.shape[0]} rows of words, expected a multiple of 3 for 3 bits")
        width, rows = words.shape[0] * 32 // bits, words.shape[1]
        groups = num_groups(width, settings.group_size, may_end_early=True)
        why = group_reason(settings.group_size)
        scales = stored.take("scales", FLOATS, groups, rows, reason=why)
        zeros = unpack(stored.take("qzeros", torch.int32, groups, rows * bits // 32, reason=why), bits)
        # The offset of the older format goes around.
        zeros = (zeros + self._zero_offset) & ((1 << bits) - 1)
        codes = unpack(words.t(), bits)
        size = width if groups == 1 else settings.group_size
        order, size, used = self._order(stored, settings, width, size)
        if used is not None:
            scales, zeros = scales[used], zeros[used]
        tensor = QuantizedTensor(
            codes=codes if order is None else codes[:, order],
            bits=bits,
            scales=scales.t().contiguous(),
            group_size=size,
            zero_points=as_zero_points(zeros.t()),
            input_order=order,
        )
        return QuantizedWeight(tensor, f"{stored.module}.qweight")

    def _order(
        self, stored: StoredTensors, settings: _Settings, width: int, regular: int
    ) -> tuple[Tensor | None, int, Tensor | None]:
        if "g_idx" not in stored:
            if settings.desc_act and regular != width:
                raise stored.error("g_idx", "is missing: quantization_config has desc_act=True")
            return None, regular, None
        group_of = stored.take("g_idx", (torch.int32, torch.int64), width)
        groups = num_groups(width, regular, may_end_early=True)
        if width and not 0 <= int(group_of.min()) <= int(group_of.max()) < groups:
            raise stored.error("g_idx", f"has values outside of [0, {groups}), the groups of scales")
        if not settings.desc_act and not group_of.any():
            # Writers that reorder nothing may leave it as it was allocated.
            return None, regular, None
        order, size, used = sort_groups(group_of, regular, groups)
        if not settings.desc_act and (order is not None or size != regular):
            raise stored.error(
                "g_idx", f"is not that of groups of {regular} inputs, which quantization_config's desc_act=False means"
            )
        return order, size, used
