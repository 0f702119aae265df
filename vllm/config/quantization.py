"""The values of `quantization`, and why some are refused."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

_FORMATS = Path(__file__).parents[1] / "quantization" / "formats"

STORED = tuple(sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules([str(_FORMATS)])))
"""Formats of checkpoints, by their files."""

ON_LOAD = ("int8", "int4", "fp8")
"""Quantisations of any unquantised checkpoint when it is loaded; fp8 may be its own format, too."""

QUANTIZATIONS = (None, *ON_LOAD, *(name for name in STORED if name not in ON_LOAD))

_INSTEAD = (
    "use a GPTQ, AWQ, compressed-tensors, fp8, bitsandbytes or GGUF checkpoint of the model, or quantization='int8', "
    "'int4' or 'fp8' with the unquantised one"
)
ALIASES = {
    "auto-round": ("auto_round", "inc", "intel/auto-round"),
    "awq": ("auto_awq", "awq_marlin", "cpu_awq"),
    "compressed-tensors": ("compressed_tensors",),
    "fp8": ("fbgemm_fp8",),
    "gptq": ("auto_gptq", "gptq_bitblas", "gptq_marlin"),
    "modelopt": ("modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"),
    "mxfp4": ("gpt_oss_mxfp4",),
}
"""Upstream's names of a format's kernels and writers."""
REFUSED = (
    "aqlm bitblas bitnet deepspeedfp eetq experts_int8 fp8_per_block fp8_per_tensor fp_quant higgs hqq "
    "humming int8_per_channel_weight_only ipex marlin "
    "moe_wna16 mxfp8 neuron_quant nvfp4 online petit_nvfp4 ptpc_fp8 qqq quanto quark quip rtn sinq spqr "
    "tpu_int8 vptq"
).split()
"""Other names of upstream and of transformers."""


def quantization_error(name: Any) -> ValueError:
    """The error for a value that is none of QUANTIZATIONS, nor registered."""
    if name in REFUSED:
        return ValueError(f"quantization={name!r} is not implemented: {_INSTEAD}")
    names = ", ".join(map(repr, QUANTIZATIONS))
    return ValueError(f"quantization must be one of {names} or registered, got {name!r}: {_INSTEAD}")


def canonical_quantization(name: Any) -> Any:
    """`name`, or what it is called here if it is one of upstream's other names for it."""
    if not isinstance(name, str):
        return name
    known = name.lower()
    if known in QUANTIZATIONS or known in REFUSED:
        return known
    return next((form for form, aliases in ALIASES.items() if known in aliases), name)


def check_gguf_quantization(asked: str | None, source: Path) -> None:
    """ValueError: it is another format of checkpoints."""
    known = ("gguf", *ON_LOAD)
    if (name := canonical_quantization(asked)) in STORED and name not in known:
        raise ValueError(
            f"quantization={asked!r}, but {source.name} is a GGUF file: leave it out, or use one of "
            f"{', '.join(map(repr, known))}"
        )
