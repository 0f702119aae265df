"""Requests and outputs of the engine core as bytes for another process: msgpack, and a step's readings (its table, or
else its arrays) as frames of their own, once for all requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vllm.exceptions import VLLMValidationError
from vllm.inputs.embeds import PromptEmbeds
from vllm.inputs.images import PromptImages
from vllm.logprobs.lists import LogprobsLists
from vllm.lora.request import LoRARequest
from vllm.pooling_params import LateChunkingParams, PoolingParams
from vllm.sampling_params import FIELDS, SamplingParams
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest

Frame = bytes | memoryview

# Fields of PoolingParams that are done with before a request is sent.
_LOCAL_FIELDS = frozenset({"output_kind", "late_interaction_params"})

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(strict=True)
# Layouts of readings, `extra`, and the outputs.
_header_decoder = msgspec.msgpack.Decoder(tuple[list[Any], Any, msgspec.Raw])

_DEFAULT_PARAMS = SamplingParams()
_PACKED = {name: row.packed for name, row in FIELDS.items()}
_UNPACKED = {name: row.unpacked for name, row in FIELDS.items() if row.unpacked is not None}
_DEFAULTS = [(name, getattr(_DEFAULT_PARAMS, name), _PACKED.get(name)) for name in SamplingParams.__struct_fields__]


def encode_request(request: EngineCoreRequest) -> bytes:
    """A request, of its parameters those not at their defaults; VLLMValidationError: its `extra_args`, or those that a
    pooling model's has in their place, cannot be serialised."""
    pooling, params, extra = request.pooling_params, request.sampling_params, "extra_args"
    values = {**vars(request), "eos_token_ids": sorted(request.eos_token_ids)}
    if pooling is not None:
        extra, names = "extra_kwargs", (name for name in PoolingParams.__struct_fields__ if name not in _LOCAL_FIELDS)
        values["pooling_params"] = {name: getattr(pooling, name) for name in names}
    else:
        values["sampling_params"] = {
            name: value if packed is None else packed(value)
            for name, default, packed in _DEFAULTS
            # An array has no truth value.
            if (value := getattr(params, name)) is not default and (default is None or value != default)
        }
    for name in ("prompt_embeds", "images"):
        if values[name] is not None:
            values[name] = values[name].pack()
    try:
        return _encoder.encode(values)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"{extra} cannot be sent to the engine's process: {error}"
        raise VLLMValidationError(message, extra, getattr(pooling or params, extra)) from None


def decode_request(data: Frame) -> EngineCoreRequest:
    """The inverse of `encode_request`."""
    values = _decoder.decode(data)
    values["eos_token_ids"] = frozenset(values["eos_token_ids"])
    if values["lora_request"] is not None:
        values["lora_request"] = LoRARequest(**values["lora_request"])
    if values["images"] is not None:
        values["images"] = PromptImages.unpack(values["images"])
    if values["prompt_embeds"] is not None:
        values["prompt_embeds"] = PromptEmbeds.unpack(*values["prompt_embeds"])
    if values["pooling_params"] is not None:
        params = values["pooling_params"]
        if params["late_chunking_params"] is not None:
            params["late_chunking_params"] = LateChunkingParams(*params["late_chunking_params"])
        values["pooling_params"] = PoolingParams(**params)
        return EngineCoreRequest(**values)
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

    def sent(value: Any) -> Any:
        if isinstance(value, LogprobsLists):
            return number_of(value)
        if isinstance(value, slice):
            return value.start, value.stop
        return list(value.shape), value.numpy().tobytes()  # a tensor

    rows = msgspec.msgpack.encode(outputs, enc_hook=sent)
    return [_encoder.encode((layouts, extra, msgspec.Raw(rows))), *frames]


class OutputDecoder:
    """The inverse of `encode_outputs`, for one thread."""

    def __init__(self) -> None:
        # Made once: it takes longer to make than to decode a step of one request.
        self._rows = msgspec.msgpack.Decoder(list[EngineCoreOutput], dec_hook=self._received)
        self._lists: list[LogprobsLists] = []

    def decode(self, frames: Sequence[Frame]) -> tuple[list[EngineCoreOutput], Any]:
        """The outputs and `extra`; the arrays are read-only views of the frames."""
        layouts, extra, rows = _header_decoder.decode(frames[0])
        data = iter(frames[1:])
        self._lists = [_lists_of(layout, data) for layout in layouts]
        outputs = self._rows.decode(rows)
        for output in outputs:
            if output.pooling_output is not None:
                shape, values = output.pooling_output
                output.pooling_output = torch.frombuffer(bytearray(values), dtype=torch.float32).view(shape)
        return outputs, extra

    def _received(self, kind: type, value: Any) -> Any:
        return self._lists[value] if kind is LogprobsLists else slice(*value)


def decode_outputs(frames: Sequence[Frame]) -> tuple[list[EngineCoreOutput], Any]:
    """See OutputDecoder."""
    return OutputDecoder().decode(frames)


def _lists_of(layout: Sequence[Any], data: Iterator[Frame]) -> LogprobsLists:
    num_topk, has_entropy, shapes = layout
    values: list[Any] = [None if each is None else np.ndarray(each[1], each[0], buffer=next(data)) for each in shapes]
    if len(values) == 1:
        return LogprobsLists.of_table(values[0], num_topk, has_entropy)
    token_ids, logprobs, logits, ranks, lse, entropy = values
    return LogprobsLists(token_ids, logprobs, logits, ranks, lse, num_topk, entropy)
