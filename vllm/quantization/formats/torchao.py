"""torchao's checkpoints in safetensors, as transformers saves them.

A module with weight [N, K] has
- _weight_qdata: int8 or float8_e4m3fn [N, K];
- _weight_scale: one value, or [N / a, K / b] for blocks of [a, b] values, of which a is usually 1;
- _weight_zero_point: int8, as the scale; the number that means 0. It may be missing.
Activations are not rounded here. Types that pack several codes into a byte are for one kind of GPU, and refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.quantization.bits import unsigned_bytes
from vllm.quantization.groups import as_zero_points
from vllm.quantization.stored import FLOATS, StoredConfig, StoredTensors, WeightFormat
from vllm.quantization.weight import QuantizedWeight

_TYPES = (
    "Float8DynamicActivationFloat8WeightConfig", "Float8StaticActivationFloat8WeightConfig", "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig", "Int8DynamicActivationIntxWeightConfig",
    "Int8StaticActivationInt8WeightConfig", "Int8WeightOnlyConfig", "IntxWeightOnlyConfig",
)  # fmt: skip
_WITH_ZEROS = ("Int8DynamicActivationIntxWeightConfig", "IntxWeightOnlyConfig")
_BY_MODULE = ("fqn_to_config", "module_fqn_to_config")
_ZEROS = "_weight_zero_point"


class TorchAOConfig(StoredConfig):
    """See the module."""

    name = "torchao"
    settings = (
        "quant_type quant_type_kwargs modules_to_not_convert include_input_output_embeddings untie_embedding_weights"
    )
    names = ("_weight_qdata", "_weight_scale", _ZEROS)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        kinds = config.get("quant_type")
        if not kinds:
            raise ValueError(f"quant_type must be one of {', '.join(_TYPES)}, got {kinds!r}")
        types = [_types(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])]
        # These types always write them; without, they would be read as symmetric.
        self._has_zeros = all(name in _WITH_ZEROS for names in types for name in names)

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        required, zeros = ("_weight_qdata", "_weight_scale"), (_ZEROS,)
        return WeightFormat((*required, *zeros), (), _read) if self._has_zeros else WeightFormat(required, zeros, _read)


def _types(kind: Any) -> set[str]:
    """Their names. ValueError: it is none of _TYPES, nor one by module that has only these."""
    name = kind.get("_type") if isinstance(kind, dict) else kind
    data = kind.get("_data") if isinstance(kind, dict) else None
    own = next((data[key] for key in _BY_MODULE if key in data), None) if isinstance(data, dict) else None
    if isinstance(own, dict):
        return set().union(*(_types(each) for each in own.values() if each is not None))
    if name not in _TYPES:
        raise ValueError(
            f"quant_type must be one of {', '.join(_TYPES)}, got {name!r}: quantise the model with one of these, or "
            "use quantization='int4' with the unquantised one"
        )
    if (form := str((data or {}).get("intx_packing_format", {}).get("_data", "UNPACKED_TO_INT8"))).upper() != (
        "UNPACKED_TO_INT8"
    ):
        raise ValueError(f"intx_packing_format must be unpacked_to_int8, got {form!r}")
    return {str(name)}


def _read(stored: StoredTensors) -> QuantizedWeight:
    data = stored.take("_weight_qdata", (torch.int8, torch.float8_e4m3fn), None, None)
    shape = (data.shape[0], data.shape[1])
    scales, size = _spread(stored, "_weight_scale", shape, FLOATS)
    source = stored.name_of("_weight_qdata")
    if data.dtype != torch.int8:
        return QuantizedWeight(QuantizedTensor(data, 8, scales, size), source)
    if (rows := len(stored.tensors["_weight_scale"])) not in (1, len(data)):
        raise stored.error("_weight_scale", f"has {rows} rows, expected 1 or {len(data)}, those of _weight_qdata")
    zeros: int | Tensor = 128
    if _ZEROS in stored:
        own, own_size = _spread(stored, _ZEROS, shape, (torch.int8,))
        if own_size != size:
            raise stored.error(_ZEROS, f"has shape {tuple(own.shape)}, expected that of _weight_scale")
        zeros = as_zero_points(unsigned_bytes(own.contiguous()))
    return QuantizedWeight(QuantizedTensor(unsigned_bytes(data), 8, scales, size, zeros), source)


def _spread(
    stored: StoredTensors, name: str, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...]
) -> tuple[Tensor, int]:
    """[N, G], and the columns of a group."""
    rows, width = shape
    if stored.tensors[name].numel() == 1:
        stored.tensors[name] = stored.tensors[name].reshape(1, 1)
    values = stored.take(name, dtypes, None, None)
    high, wide = values.shape
    if not high or not wide or rows % high or width % wide:
        raise stored.error(name, f"has shape {(high, wide)}, expected divisors of the {rows} rows and {width} columns")
    return values.repeat_interleave(rows // high, 0), width // wide
