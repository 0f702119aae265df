"""Callers' messages about new weights, and about the trainers that send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.utils.checks import check_integer, wrong_type

BACKENDS = ("nccl", "ipc")

_INIT_FIELDS = ("master_address", "master_port", "world_size", "rank_offset")
_ANNOUNCED = ("names", "dtype_names", "shapes")
# Tensors are sent many at a time, whatever these say.
_PACKING = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")


def check_weight_transfer_config(config: Any) -> None:
    """
    Raises:
        VLLMValidationError: it asks for a transport that is not one of BACKENDS.
    """
    if not config or config == "auto":
        return
    backend = config.get("backend") if isinstance(config, Mapping) else getattr(config, "backend", None)
    if backend not in BACKENDS:
        raise VLLMValidationError(
            f"weight_transfer_config: backend must be one of {', '.join(BACKENDS)}, got {backend!r}",
            "weight_transfer_config",
            backend,
        )


def trainer_of(request: Any) -> dict[str, Any] | None:
    """Where `init_weight_transfer_engine` is to meet a trainer, as arguments of the workers' method; None: its
    init_info is empty, and weights are to come as files.

    Raises:
        VLLMValidationError: it lacks an entry, has an unknown one, or one of another type.
    """
    info = _entry(request, "init_info")
    if not info:
        return None
    info = _mapping("init_info", info, (*_INIT_FIELDS, *_PACKING))
    for name in _INIT_FIELDS[:3]:
        if name not in info:
            raise VLLMValidationError(f"init_info lacks {name}", "init_info", None)
    if not isinstance(info["master_address"], str):
        raise wrong_type("master_address", info["master_address"], "a text")
    return {
        "address": info["master_address"],
        "port": check_integer("master_port", info["master_port"], 1, 65535),
        "world_size": check_integer("world_size", info["world_size"], 2),
        "rank_offset": check_integer("rank_offset", info.get("rank_offset", 1), 1),
    }


def weights_of_update(request: Any) -> tuple[str, tuple[Any, ...]]:
    """The method of workers that a request for new weights asks for, and its arguments. Its `update_info` is {"path":
    FILE}, {"weights": pairs}, or what a trainer is about to send: names, dtype_names, shapes.

    Raises:
        VLLMValidationError: it says none of these, or more.
    """
    info = _entry(request, "update_info")
    if isinstance(info, Mapping) and "names" in info:
        return "receive_weights", _announced(_mapping("update_info", info, (*_ANNOUNCED, *_PACKING)))
    methods = {"path": "update_weights_from_file", "weights": "update_weights"}
    if not isinstance(info, Mapping) or len(info) != 1 or (name := next(iter(info))) not in methods:
        given = ", ".join(map(str, info)) if isinstance(info, Mapping) else repr(info)
        raise VLLMValidationError(
            "update_info must have one entry: path, of a safetensors file on the engine's machine, or, in its process, "
            "weights, of (name, tensor) pairs; or names, dtype_names and shapes of what a trainer sends that "
            f"init_weight_transfer_engine has met; got {given}",
            "update_info",
            info,
        )
    if name == "path":
        return methods[name], (info[name],)
    weights = info[name]
    return methods[name], (list(weights.items() if isinstance(weights, Mapping) else weights),)


def _announced(info: Mapping[str, Any]) -> tuple[list[str], list[str], list[list[int]]]:
    import torch

    names, dtypes, shapes = (info.get(name) for name in _ANNOUNCED)
    for name, value in zip(_ANNOUNCED, (names, dtypes, shapes), strict=True):
        if not isinstance(value, list | tuple):
            raise wrong_type(name, value, "a list")
    assert names is not None and dtypes is not None and shapes is not None
    if not len(names) == len(dtypes) == len(shapes):
        message = f"names, dtype_names and shapes must be as many, got {len(names)}, {len(dtypes)} and {len(shapes)}"
        raise VLLMValidationError(message, "update_info", None)
    for dtype in dtypes:
        if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
            raise VLLMValidationError(f"dtype_names: {dtype!r} is no dtype of torch", "update_info", dtype)
    for shape in shapes:
        if not isinstance(shape, list | tuple):
            raise wrong_type("shapes", shape, "a list of lists of sizes")
        for size in shape:
            check_integer("shapes", size, 0)
    return list(map(str, names)), list(map(str, dtypes)), [list(shape) for shape in shapes]


def _entry(request: Any, name: str) -> Any:
    return request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)


def _mapping(name: str, info: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(info, Mapping):
        raise wrong_type(name, info, "an object")
    for entry in info:
        if entry not in known:
            raise VLLMValidationError(f"{name}: {entry} is not served; known are {', '.join(known)}", name, entry)
    return info
