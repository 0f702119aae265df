"""The values of `quantization`: what they mean here, and why some are refused."""

from __future__ import annotations

from typing import Any

STORED = (
    "auto-round", "awq", "bitsandbytes", "compressed-tensors", "fp8", "gguf", "gptq", "modelopt", "mxfp4", "squeezellm",
    "torchao",
)  # fmt: skip
"""Formats of checkpoints."""

ON_LOAD = ("int8", "int4", "fp8")
"""What is done to any unquantised checkpoint when it is loaded; fp8 may be its own format, too."""

QUANTIZATIONS = (None, *ON_LOAD, *(name for name in STORED if name not in ON_LOAD))

# Upstream's names of kernels and writers of a format.
_ALIASES = {
    "auto_awq": "awq",
    "auto_gptq": "gptq",
    "auto_round": "auto-round",
    "inc": "auto-round",
    "intel/auto-round": "auto-round",
    "awq_marlin": "awq",
    "compressed_tensors": "compressed-tensors",
    "cpu_awq": "awq",
    "fbgemm_fp8": "fp8",
    "gptq_bitblas": "gptq",
    "gptq_marlin": "gptq",
    "gpt_oss_mxfp4": "mxfp4",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
}
_INSTEAD = (
    "use a GPTQ, AWQ, compressed-tensors, fp8, bitsandbytes or GGUF checkpoint of the model, or quantization='int8', "
    "'int4' or 'fp8' with the unquantised one"
)
# Other names of upstream and of transformers.
_REFUSED = (
    "aqlm bitblas bitnet deepspeedfp eetq experts_int8 fp8_per_block fp8_per_tensor fp_quant higgs hqq "
    "humming int8_per_channel_weight_only ipex marlin "
    "moe_wna16 mxfp8 neuron_quant nvfp4 online petit_nvfp4 ptpc_fp8 qqq quanto quark quip rtn sinq spqr "
    "tpu_int8 vptq"
).split()


def canonical_quantization(name: Any) -> Any:
    """`name`, or what it is called here if it is one of upstream's other names for it."""
    if not isinstance(name, str):
        return name
    known = name.lower()
    return _ALIASES.get(known, known if known in QUANTIZATIONS or known in _REFUSED else name)


def quantization_error(name: Any) -> ValueError:
    """The error for a value that is none of QUANTIZATIONS, nor registered."""
    if name in _REFUSED:
        return ValueError(f"quantization={name!r} is not implemented: {_INSTEAD}")
    names = ", ".join(map(repr, QUANTIZATIONS))
    return ValueError(f"quantization must be one of {names} or registered, got {name!r}: {_INSTEAD}")
