"""Fills a model's parameters from a checkpoint, tensor by tensor, or with random numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vllm.config.checkpoint.shards import shard_files
from vllm.config.checkpoint.weight_files import check_range, iterate_tensors, progress_bar, tensor_files
from vllm.distributed.stages import get_stage
from vllm.layers.attention import Attention
from vllm.layers.dummy_weights import dummy_weight
from vllm.layers.sharding import WeightSlot
from vllm.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.layers.weight_update import BASE_PREFIX, HEAD, checkpoint_parts, module_slots
from vllm.quantization.base_config import QuantizationConfig
from vllm.quantization.stored import StoredConfig, Value, read_quantized
from vllm.quantization.weight import QuantizedStack, QuantizedWeight
from vllm.utils.loading_threads import await_handed_over

_NUM_NAMED = 5
# GPTQ, AWQ, SqueezeLLM and compressed-tensors, and torchao call the codes of a weight so.
_QUANTIZED_NAMES = ("qweight", "weight_packed", "_weight_qdata")


def checkpoint_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Where each tensor of a checkpoint goes, by its Hugging Face name."""
    return {key: slot for name, module in model.named_modules() for key, slot in module_slots(module, name).items()}


def load_weights(
    model: Any,
    folder: Path,
    use_tqdm: bool = False,
    quantization: QuantizationConfig | None = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    filled: Callable[[str], None] | None = None,
) -> None:
    """Copy this rank's part of every tensor of the folder's safetensors into the model, converting to the parameters'
    dtype; a StoredConfig says which are quantised weights, which stay so. `tensors`: plain ones in place of the
    folder's. `filled` is told each name of `checkpoint_slots` whose tensor is in its place.

    Raises:
        ValueError: a weight is missing, unexpected, of another shape or not stored as `quantization` says; or a rank's
            part of a quantised one begins inside of a group.
    """
    slots = checkpoint_slots(model)
    expected, kv_scales = len(slots), KVScales(model)
    embedding = next((module.tied_to for module in model.modules() if isinstance(module, ParallelLMHead)), None)
    own_layers = None if get_stage().size == 1 else set(model.model.own_layers)
    head: Value | None = None
    unexpected: list[str] = []
    with progress_bar("Loading weights", expected, use_tqdm) as bar:
        files = shard_files(folder) if tensors is None else []
        given = iterate_tensors(files) if tensors is None else tensors
        stored = kv_scales.taken_from(given if own_layers is None else _of_layers(given, own_layers))
        values_by_name: Iterable[tuple[str, Value]] = stored
        if isinstance(quantization, StoredConfig):
            values_by_name = read_quantized(stored, tensor_files(files), quantization)
        convert = getattr(model, "convert_checkpoint", None)
        for name, tensor in _of_folder(folder, values_by_name if convert is None else convert(values_by_name)):
            for part, values in _parts(model, files, name, tensor):
                if embedding is not None and part == HEAD:
                    head = values
                    continue
                key = part if part in slots else BASE_PREFIX + part
                slot = slots.pop(key, None)
                if slot is None:
                    if quantization is None or not _is_zero_bias(name, values):
                        unexpected.append(name)
                    continue
                _fill(slot, files, name, values)
                if filled is not None:
                    filled(key)
                bar.update()
    kv_scales.give()
    if isinstance(head, Tensor) and embedding is not None:
        # Writers that store a shared weight once keep either name.
        own = next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)
        if (slot := slots.pop(own, None)) is not None:
            _fill(slot, files, HEAD, head)
    lacking = [name for name, slot in slots.items() if not slot.may_lack]
    if quantization is None:
        _refuse_quantized(folder, lacking, unexpected)
    _refuse(folder, "lacks", lacking)
    _refuse(folder, "has unexpected", unexpected)
    if isinstance(head, Tensor | QuantizedWeight) and embedding is not None:
        # The embedding's weight is the packed head's from some moment on.
        await_handed_over()
        if not embedding.holds(head):
            raise ValueError(
                f"{folder.name} has an {HEAD} that differs from the embeddings, but config.json (or the model's "
                'default) ties them: pass hf_overrides={"tie_word_embeddings": False} to use it'
            )


def _of_layers(tensors: Iterable[tuple[str, Tensor]], own: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are not of other stages' layers, by the names that decoders' layers have in checkpoints."""
    for name, tensor in tensors:
        layer = _DECODER_LAYER.search(name)
        if layer is None or int(layer[1]) in own:
            yield name, tensor


def _of_folder(folder: Path, tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    """`tensors`, whose errors name the folder."""
    try:
        yield from tensors
    except ValueError as error:
        if str(error).startswith(folder.name):
            raise
        raise ValueError(f"{folder.name}: {error}") from error


def _parts(model: nn.Module, files: list[Path], name: str, value: Value) -> list[tuple[str, Value]]:
    try:
        return list(checkpoint_parts(model, name, value))
    except ValueError as error:
        raise ValueError(f"{_where(files, name, value)}: {error}") from None


def _where(files: list[Path], name: str, value: Value) -> str:
    """The file that a checkpoint's tensor is in, or the folder if the name was made up for it."""
    others = files[0].parent.name if files else "the loader"
    return tensor_files(files).get(_stored_name(name, value), others)


def _stored_name(name: str, value: Value) -> str:
    return name if isinstance(value, Tensor) else value.source


def _fill(slot: WeightSlot, files: list[Path], name: str, value: Value) -> None:
    stored = _stored_name(name, value)
    if isinstance(value, Tensor) and slot.shape == (1,) and value.dim() == 0:
        value = value.view(1)
    # A stack's slot knows its own shape: the plain one may be transposed.
    if not isinstance(value, QuantizedStack) and slot.shape != tuple(value.shape):
        raise ValueError(
            f"{_where(files, name, value)}: weight {stored} has shape {tuple(value.shape)}, "
            f"but config.json means {slot.shape}"
        )
    try:
        slot.fill(value)
    except ValueError as error:
        raise ValueError(f"{_where(files, name, value)}: {error}") from None
    if isinstance(value, Tensor):
        try:
            check_range(value, slot.target.dtype)
        except ValueError as error:
            raise ValueError(f"{_where(files, name, value)}: weight {stored} {error}") from None


def _is_zero_bias(name: str, value: Value) -> bool:
    """Whether it is the bias that some quantisers give every layer."""
    return name.endswith(".bias") and isinstance(value, Tensor) and not value.any()


def _refuse_quantized(folder: Path, lacking: list[str], unexpected: list[str]) -> None:
    """ValueError: a weight that the model lacks is there in a format that nothing names."""
    modules = {name.removesuffix(".weight"): name for name in lacking if name.endswith(".weight")}
    for name in unexpected:
        module, _, ending = name.rpartition(".")
        if module in modules and ending in _QUANTIZED_NAMES:
            raise ValueError(
                f"{folder.name} has {name} in place of {modules[module]}, a quantised weight, but config.json has no "
                "quantization_config that says how it is to be read"
            )


def _refuse(folder: Path, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        raise ValueError(f"{folder.name} {verb} weights: {', '.join(names[:_NUM_NAMED])}{more}")


def fill_with_noise(model: nn.Module, seed: int) -> None:
    """Fill every weight that a checkpoint would with `dummy_weight`, of which a rank takes its part."""
    for name, slot in checkpoint_slots(model).items():
        if slot.is_elsewhere:
            continue
        slot.fill(dummy_weight(name, slot.shape, slot.target.dtype, slot.target.device, seed))


_NAME = re.compile(r"(?:k_proj\.output_|v_proj\.output_|k_|v_|kv_)scale$")
_LAYER = re.compile(r"\.(\d+)\.")
_DECODER_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")


class KVScales:
    """Scales of the KV cache, by attention layer."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[str, Attention] = {}
        for name, module in model.named_modules():
            number = _LAYER.search(f".{name}.")
            if isinstance(module, Attention) and number:
                self._layers[number[1]] = module
        self._found: dict[tuple[str, str], float] = {}

    def taken_from(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are none.

        Raises:
            ValueError: a scale that is not positive and finite.
        """
        for name, tensor in tensors:
            kind, layer = _NAME.search(name), _LAYER.search(name)
            if kind is None or layer is None or layer[1] not in self._layers or tensor.numel() != 1:
                yield name, tensor
                continue
            value = float(tensor)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive, got {value}")
            for letter in kind[0].partition("_")[0]:
                self._found[layer[1], letter] = value

    def give(self) -> None:
        """Set the layers' scales to what was found."""
        for (number, letter), value in self._found.items():
            setattr(self._layers[number], f"{letter}_scale", value)
