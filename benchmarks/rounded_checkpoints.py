"""Checkpoints of each format made of an unquantised one, its linear weights rounded to the nearest codes.

The tests' packers write them. Calibrated checkpoints (GPTQ, AWQ, AutoRound, SqueezeLLM) choose codes by data, and drift
less.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from common import ROOT

# Names of rows in tests/quantization/test_formats.py.
FORMATS = (
    *("gptq-8-asym", "gptq-4-asym", "gptq-4", "gptq-3-asym", "gptq-2-asym", "awq-64", "squeezellm"),
    *("squeezellm-sparse", "packed-8", "packed-4", "packed-3", "int8", "float8", "float8-tensor", "nvfp4", "mxfp4"),
    *("fp8", "fp8-block", "nf4", "fp4", "bitsandbytes-8"),
)


def make_checkpoint(model: Path, name: str, target: Path) -> None:
    """Write the folder `target`: `model`, a folder with one safetensors file, in the format `name`. Embedding and head
    stay as they are."""
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "quantization")]
    from safetensors.torch import load_file, save_file
    from test_formats import ROWS

    row = ROWS[name]
    tensors = {}
    for key, tensor in load_file(model / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if not module.endswith("proj"):
            tensors[key] = tensor
            continue
        stored = row.pack(tensor.float())
        tensors |= {f"{module}.{own}": each.clone().contiguous() for own, each in stored.tensors.items()}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    if row.where == "config.json":
        config["quantization_config"] = row.settings
    else:
        (target / row.where).write_text(json.dumps(row.settings), encoding="utf-8")
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
