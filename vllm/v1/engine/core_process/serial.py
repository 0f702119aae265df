"""Requests and outputs of the engine core as bytes for another process: msgpack, and a step's readings (its table, or
else its arrays) as frames of their own, once for all requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vllm.exceptions import VLLMValidationError
from vllm.inputs.embeds import PromptEmbeds
from vllm.inputs.images import PromptImages
from vllm.logprobs.lists import LogprobsLists, LogprobsRows
from vllm.lora.request import LoRARequest
from vllm.pooling_params import LateChunkingParams, PoolingParams
from vllm.sampling_params import FIELDS, SamplingParams
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest

Frame = bytes | memoryview

# Fields of PoolingParams that are done with before a request is sent.
_LOCAL_FIELDS = frozenset({"output_kind", "late_interaction_params"})

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(strict=True)

_DEFAULT_PARAMS = SamplingParams()
_PACKED = {name: row.packed for name, row in FIELDS.items()}
_UNPACKED = {name: row.unpacked for name, row in FIELDS.items() if row.unpacked is not None}
_DEFAULTS = [(name, getattr(_DEFAULT_PARAMS, name), _PACKED.get(name)) for name in SamplingParams.__struct_fields__]


def encode_request(request: EngineCoreRequest) -> bytes:
    """A request, of its parameters those not at their defaults; VLLMValidationError: unserialisable `extra_args`."""
    if request.pooling_params is not None:
        return _encode_pooling(request)
    params = request.sampling_params
    changed = {
        name: value if packed is None else packed(value)
        for name, default, packed in _DEFAULTS
        # An array has no truth value.
        if (value := getattr(params, name)) is not default and (default is None or value != default)
    }
    values = {**vars(request), "eos_token_ids": sorted(request.eos_token_ids), "sampling_params": changed}
    if request.prompt_embeds is not None:
        values["prompt_embeds"] = request.prompt_embeds.pack()
    if request.images is not None:
        values["images"] = request.images.pack()
    try:
        return _encoder.encode(values)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"extra_args cannot be sent to the engine's process: {error}"
        raise VLLMValidationError(message, "extra_args", params.extra_args) from None


def _encode_pooling(request: EngineCoreRequest) -> bytes:
    assert request.pooling_params is not None
    names = (name for name in PoolingParams.__struct_fields__ if name not in _LOCAL_FIELDS)
    params = {name: getattr(request.pooling_params, name) for name in names}
    values = {**vars(request), "eos_token_ids": (), "pooling_params": params}
    if request.images is not None:
        values["images"] = request.images.pack()
    try:
        return _encoder.encode(values)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"extra_kwargs cannot be sent to the engine's process: {error}"
        raise VLLMValidationError(message, "extra_kwargs") from None


def _encode_tensor(tensor: torch.Tensor) -> tuple[list[int], bytes]:
    return list(tensor.shape), tensor.numpy().tobytes()


def decode_request(data: Frame) -> EngineCoreRequest:
    """The inverse of `encode_request`."""
    values = _decoder.decode(data)
    values["eos_token_ids"] = frozenset(values["eos_token_ids"])
    if values["lora_request"] is not None:
        values["lora_request"] = LoRARequest(**values["lora_request"])
    if values["images"] is not None:
        values["images"] = PromptImages.unpack(values["images"])
    if values["pooling_params"] is not None:
        params = values["pooling_params"]
        if params["late_chunking_params"] is not None:
            params["late_chunking_params"] = LateChunkingParams(*params["late_chunking_params"])
        values["pooling_params"] = PoolingParams(**params)
        return EngineCoreRequest(**values)
    if values["prompt_embeds"] is not None:
        values["prompt_embeds"] = PromptEmbeds.unpack(*values["prompt_embeds"])
    changed = values["sampling_params"]
    # Not through the constructor: the parameters were checked before they were sent.
    params = values["sampling_params"] = _DEFAULT_PARAMS.clone()
    for name, value in changed.items():
        setattr(params, name, _UNPACKED[name](value) if name in _UNPACKED else value)
    return EngineCoreRequest(**values)


def encode_outputs(outputs: Sequence[EngineCoreOutput], extra: Any = None) -> list[Frame]:
    """A step's outputs as frames: a header, then the arrays it refers to. `extra`: anything that msgpack can hold."""
    lists: dict[int, int] = {}  # id of a LogprobsLists -> its number
    layouts: list[Any] = []
    frames: list[Frame] = []

    def number_of(readings: LogprobsLists) -> int:
        number = lists.get(id(readings))
        if number is None:
            number = lists[id(readings)] = len(layouts)
            arrays = [readings.table()] if readings.has_table else readings.arrays()
            shapes = [None if array is None else (array.dtype.str, array.shape) for array in arrays]
            layouts.append((readings.num_topk, readings.has_entropy, shapes))
            whole = (np.ascontiguousarray(array).reshape(-1) for array in arrays if array is not None)
            frames.extend(array.view(np.uint8).data for array in whole)
        return number

    rows = [
        (
            output.request_id,
            output.new_token_ids,
            None if output.logprobs is None else [(number_of(lists), row) for lists, row in output.logprobs],
            output.finish_reason,
            output.stop_reason,
            output.num_cached_tokens,
            output.error,
            None
            if output.prompt_logprobs is None
            else [(number_of(r.lists), r.rows.start, r.rows.stop, *r[2:]) for r in output.prompt_logprobs],
            output.scheduled_time,
            None if output.pooling_output is None else _encode_tensor(output.pooling_output),
            output.allowed_mass,
            output.num_drafted,
            output.num_accepted,
            output.kv_transfer_params,
        )
        for output in outputs
    ]
    return [_encoder.encode((rows, layouts, extra)), *frames]


def decode_outputs(frames: Sequence[Frame]) -> tuple[list[EngineCoreOutput], Any]:
    """The inverse of `encode_outputs`; the arrays are read-only views of the frames."""
    rows, layouts, extra = _decoder.decode(frames[0])
    data = iter(frames[1:])
    lists = []
    for num_topk, has_entropy, shapes in layouts:
        values: list[Any] = [
            None if each is None else np.ndarray(each[1], each[0], buffer=next(data)) for each in shapes
        ]
        if len(values) == 1:
            lists.append(LogprobsLists.of_table(values[0], num_topk, has_entropy))
        else:
            token_ids, logprobs, logits, ranks, lse, entropy = values
            lists.append(LogprobsLists(token_ids, logprobs, logits, ranks, lse, num_topk, entropy))
    return [_decode_output(row, lists) for row in rows], extra


def _decode_output(row: list[Any], lists: Sequence[LogprobsLists]) -> EngineCoreOutput:
    request_id, new_token_ids, logprobs, finish_reason, stop_reason, num_cached_tokens, error, prompt, *rest = row
    scheduled, pooled, *counts = rest
    return EngineCoreOutput(
        request_id,
        new_token_ids,
        None if logprobs is None else [(lists[number], index) for number, index in logprobs],
        finish_reason,
        stop_reason,
        num_cached_tokens,
        error,
        None
        if prompt is None
        else [LogprobsRows(lists[number], slice(start, stop), *counts) for number, start, stop, *counts in prompt],
        scheduled,
        None if pooled is None else torch.frombuffer(bytearray(pooled[1]), dtype=torch.float32).view(pooled[0]),
        *counts,
    )
