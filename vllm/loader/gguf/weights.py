"""The weights of a safetensors checkpoint, made from a GGUF file's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vllm.loader.gguf.architectures import ARCHITECTURES
from vllm.loader.gguf.changes import EVERYWHERE, Weight, stacked
from vllm.loader.gguf.encoders import DENSE
from vllm.loader.gguf.file import GGUFFile
from vllm.loader.gguf.header import GGUFHeader

# A block's number, the part, the number of a single expert, and the ending.
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(.+?)(?:\.(\d+))?(?:\.(weight|bias|scale))?")
# Read as part of the configuration, or following from it.
_UNREAD = re.compile(r"(rope_freqs|rope_factors_long|rope_factors_short)\.weight|(blk\.\d+\.)?attn_rot_embd\..*")


def weights(file: GGUFFile) -> Iterator[Weight]:
    """Every weight of the checkpoint; ValueError for a tensor that the architecture does not have."""
    header = GGUFHeader(file)
    row = ARCHITECTURES[header.architecture]
    changes = EVERYWHERE | row.changes
    for tensor, entry in file.tensors.items():
        match = _TENSOR.fullmatch(tensor)
        layer, part, expert, ending = match.groups() if match is not None else (None, tensor, None, None)
        if _UNREAD.fullmatch(tensor) or part in DENSE or (layer is not None and int(layer) in header.further):
            continue
        name = row.names.find(layer, part, expert, ending)
        if name is None:
            raise header.error(f"{header.architecture} has no tensor {tensor}")
        is_norm = part.endswith("norm") and ending == "weight"
        change = changes.get(part) or (changes.get("norm") if is_norm else None) or (stacked if "{}" in name else None)
        weight = Weight(name, entry.shape, tensor)
        yield from (weight,) if change is None else change(header, weight)
    if row.further is not None:
        yield from row.further(header)
