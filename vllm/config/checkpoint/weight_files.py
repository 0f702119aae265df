"""A folder's files of weights: safetensors or, without those, pytorch_model.bin, whose reading runs no code; and the
list of what stays in other files."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm.config.checkpoint.mapped_tensors import iterate_mapped, read_places
from vllm.config.checkpoint.shards import LIST_NAME
from vllm.utils.host_memory import PassedPages

_DTYPES_BY_NAME = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Progress of shorter work is not shown.
PROGRESS_DELAY_SECONDS = 2.0


def iterate_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all files, mapped into memory one file after another; ValueError for a file that is cut, or
    no safetensors, or a .bin file that holds anything but tensors."""
    from safetensors import SafetensorError, safe_open

    for path in files:
        if path.name == LIST_NAME:
            yield from iterate_mapped(path)
            continue
        if path.suffix in (".bin", ".pt"):
            yield from _load_bin(path).items()
            continue
        try:
            with safe_open(path, framework="pt") as shard:
                passed = PassedPages(path)
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    tensor = shard.get_tensor(name)
                    yield name, tensor
                    passed.add(tensor.data_ptr(), tensor.nbytes)
        except SafetensorError as error:
            raise ValueError(f"{path.name} is not a usable safetensors file: {error}") from error


def check_range(tensor: Tensor, dtype: torch.dtype) -> None:
    """ValueError: a finite value of the tensor would be infinite in `dtype`."""
    if dtype != torch.float16 or tensor.dtype not in (torch.float32, torch.bfloat16) or not tensor.numel():
        return
    greatest = max(-float(tensor.min()), float(tensor.max()))
    if torch.finfo(dtype).max < greatest < float("inf"):
        raise ValueError(
            f"has values of up to {greatest:.5g}, beyond float16's greatest, 65504: use dtype='bfloat16' or 'float32'"
        )


def _load_bin(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by torch.save, mapped into memory unless it is older than PyTorch 1.6."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        # PyTorch's text is about its arguments.
        found = re.search(r"Unsupported [^\n]*?(?= was not|\n|$)", str(error))
        reason = found[0] if found is not None else str(error).split("\n")[0]
        raise ValueError(
            f"{path.name} is not a usable file of tensors ({reason}). What else a pickle holds is not loaded, "
            "because that can run code: if you trust it, convert it to safetensors by transformers' save_pretrained"
        ) from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path.name} must hold tensors by their names, got {type(loaded).__name__}")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(f"{path.name} must hold tensors by their names, got {name!r}: {type(value).__name__}")
    return loaded


def tensor_files(files: list[Path]) -> dict[str, str]:
    """By the names of all tensors, the folder and name of the file that each is in, without reading the tensors;
    ValueError as iterate_tensors."""
    from safetensors import SafetensorError, safe_open

    names: dict[str, str] = {}
    for path in files:
        where = f"{path.parent.name}/{path.name}"
        if path.name == LIST_NAME:
            names |= dict.fromkeys(read_places(path), where)
            continue
        if path.suffix == ".bin":
            names |= dict.fromkeys(_load_bin(path), where)
            continue
        try:
            with safe_open(path, framework="pt") as shard:
                names |= dict.fromkeys(shard.keys(), where)
        except SafetensorError as error:
            raise ValueError(f"{path.name} is not a usable safetensors file: {error}") from error
    return names


def stored_dtype(files: list[Path]) -> str | None:
    """The dtype of the first tensor that has a known floating-point one, or None, without reading the tensors."""
    from safetensors import safe_open

    for path in files:
        if path.name == LIST_NAME:
            dtypes = [place.dtype for place in read_places(path).values()]
        elif path.suffix == ".bin":
            dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in _load_bin(path).values()]
        else:
            with safe_open(path, framework="pt") as shard:
                dtypes = [_DTYPES_BY_NAME.get(shard.get_slice(name).get_dtype(), "") for name in shard.keys()]  # noqa: SIM118
        known = [dtype for dtype in dtypes if dtype in _DTYPES_BY_NAME.values()]
        if known:
            return known[0]
    return None


def progress_bar(description: str, num_tensors: int, use_tqdm: bool) -> Any:
    """A tqdm bar over tensors, as a context manager; hidden for PROGRESS_DELAY_SECONDS."""
    from tqdm import tqdm

    options: dict[str, Any] = {"unit": "tensor", "delay": PROGRESS_DELAY_SECONDS, "dynamic_ncols": True}
    return tqdm(total=num_tensors, desc=description, disable=not use_tqdm, **options)
