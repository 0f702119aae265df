"""AutoRound's checkpoints, whose tensors are those of GPTQ, AWQ, FP8 or compressed-tensors: their settings in the
terms of these formats."""

from __future__ import annotations

import re
from typing import Any

from vllm.quantization.formats.awq import AWQConfig
from vllm.quantization.formats.compressed_tensors import CompressedTensorsConfig
from vllm.quantization.formats.fp8 import Fp8Config
from vllm.quantization.formats.gptq import GPTQConfig
from vllm.quantization.setting_values import read_objects
from vllm.quantization.stored import StoredConfig, WeightFormat

_GPTQ, _AWQ, _COMPRESSED = "auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:llm_compressor"
_KEYS = ("packing_format", "backend")
# Whose zero points are stored as they are.
_PLAIN = ("auto_round", "auto_round:exllamav2", "auto_round:tritonv2", "auto_round:gptqmodel")
_EARLY_AWQ = re.compile(r"(auto_round:)?(auto_)?awq(:gemm)?")
_FP8 = ("auto_round:fp8", "auto_round:fp8_static")
_PLAIN_BITS = 16
# By the beginning of data_type and the bits, compressed-tensors' format and what else weights have there.
_FLOATS: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {
    ("nv_fp", 4): ("nvfp4-pack-quantized", {"strategy": "tensor_group", "group_size": 16}),
    ("mx_fp", 4): ("mxfp4-pack-quantized", {"strategy": "group", "group_size": 32}),
    ("mx_fp", 8): ("mxfp8-quantized", {"strategy": "group", "group_size": 32}),
}


class AutoRoundConfig(StoredConfig):
    """See the module."""

    name = "auto-round"

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        packing = _packing(config)
        own = read_objects(config, "extra_config")
        if packing in _FP8:
            self._format: StoredConfig = Fp8Config(config)
        elif packing == _COMPRESSED:
            self._format = CompressedTensorsConfig(_compressed_settings(config, own))
        elif packing in (_GPTQ, _AWQ, *_PLAIN):
            self._format = _integers(config, own, packing)
        else:
            names = ", ".join((_GPTQ, _AWQ, _COMPRESSED, *_PLAIN, *_FP8))
            key = next((key for key in _KEYS if config.get(key)), _KEYS[0])
            raise ValueError(f"{key} must be one of {names}, got {config.get(key)!r}")
        self.names = self._format.names
        self.shared_names = self._format.shared_names

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        return self._format.weight_format(module, stored)


def _packing(config: dict[str, Any]) -> str:
    """packing_format; early versions have a `backend` that says it, and name the program that runs GPTQ's or AWQ's.
    Marlin's tensors are others, whatever they were made from."""
    name = next((str(config[key]) for key in _KEYS if config.get(key)), _GPTQ)
    name = name.replace("auto-round", "auto_round").replace("autoround", "auto_round")
    if _EARLY_AWQ.fullmatch(name):
        return _AWQ
    is_gptq = "gptq" in name and "gptqmodel" not in name and "marlin" not in name
    return _GPTQ if is_gptq or name == "auto" else name


def _integers(config: dict[str, Any], own: dict[str, dict[str, Any]], packing: str) -> StoredConfig:
    if config.get("data_type", "int") != "int" or (config.get("act_bits") or _PLAIN_BITS) < _PLAIN_BITS:
        raise ValueError(f"data_type must be int, and act_bits 16, with packing_format {packing}")
    dynamic = {}
    for name, changes in own.items():
        is_plain = changes.get("bits", 0) >= _PLAIN_BITS
        dynamic[("-:" if is_plain else "+:") + _pattern(name)] = {
            key: changes[key] for key in ("bits", "group_size", "sym") if key in changes
        }
    settings = {**config, "dynamic": dynamic}
    if packing == _AWQ and any(
        changes.get("bits", 4) not in (4, _PLAIN_BITS) or "group_size" in changes for changes in own.values()
    ):
        raise ValueError("extra_config cannot change bits or group_size of single modules in AWQ's layout")
    if packing == _AWQ:
        return AWQConfig(settings)
    return GPTQConfig({**settings, "checkpoint_format": "gptq_v2" if packing in _PLAIN else "gptq"})


def _compressed_settings(config: dict[str, Any], own: dict[str, dict[str, Any]]) -> dict[str, Any]:
    groups = {"all": _group(config, ["Linear"])}
    ignored = []
    for name, changes in own.items():
        target = f"re:{_pattern(name)}"
        if changes.get("bits", 0) >= _PLAIN_BITS:
            ignored.append(target)
        elif changes:
            groups[f"extra_config: {name}"] = _group(config | changes, [target])
    return {"config_groups": groups, "ignore": ignored}


def _group(settings: dict[str, Any], targets: list[str]) -> dict[str, Any]:
    kind, bits = str(settings.get("data_type")), settings.get("bits", 4)
    found = next((form for (start, own), form in _FLOATS.items() if kind.startswith(start) and own == bits), None)
    if found is None:
        names = ", ".join(f"{start} of {own} bits" for start, own in _FLOATS)
        raise ValueError(f"data_type must be one of {names} with packing_format {_COMPRESSED}, got {kind} of {bits}")
    name, weights = found
    return {"targets": targets, "format": name, "weights": {"type": "float", "num_bits": bits, **weights}}


def _pattern(name: str) -> str:
    """An expression for a module's name, or for names with some characters that only expressions have."""
    return f"(?:{name})$" if re.search(r"[*+?\[\]()|\\^$]", name) else f"{re.escape(name)}$"
