"""A model's picture tower and projector: transformers' modules, loaded alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm.config import ModelConfig
from vllm.config.checkpoint.shards import tower_files
from vllm.config.checkpoint.text_part import text_tensor_name
from vllm.config.checkpoint.weight_files import iterate_tensors
from vllm.inputs.picture_rows import ROWS
from vllm.layers.dummy_weights import dummy_weight
from vllm.models.transformers.build import construct_plain
from vllm.models.transformers.weights import CheckpointNames
from vllm.models.vision.families import PictureFamily
from vllm.models.vision.layers import ATTENTION, Packed, packed_layers, register_attention, use_own_layers

_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".scales", ".SCB", ".absmax")
ROW_KINDS = "row_kinds"
"""Beside the tower's arguments, int64 [N]: 0 for a row of the picture, i for the row of the family's i-th marker."""


_JOINED = {"pixel_values", "image_grid_thw"}
_PATCHES_OF_A_RUN = 1024  # more together take longer than one picture after the other


class Tower(nn.Module):
    """Makes rows of the decoder's embedding of pictures."""

    def __init__(self, family: PictureFamily, model_config: ModelConfig, device: torch.device) -> None:
        """ValueError: weights are missing, quantised, or of another shape."""
        super().__init__()
        self._family = family
        self._arguments = set(inspect.signature(family.base.get_image_features).parameters)
        self._video_arguments = set(family.video_arguments)
        dtype = getattr(torch, model_config.dtype)
        register_attention()
        try:
            whole = construct_plain(family.base, family.config, dtype, ATTENTION)
        except KeyError:  # towers made of SAM's look a class up, among transformers' own names
            whole = construct_plain(family.base, family.config, dtype, "sdpa")
        self._names = CheckpointNames(whole)
        # The decoder is ours, and nobody listens; their modules keep nothing but the place.
        for name, part in list(whole.named_children()):
            if part is whole.get_decoder() or "audio" in name:
                setattr(whole, name, nn.Module())
        use_own_layers(whole)
        if family.config.model_type == "mistral3":
            # The caller squeezes the axis of a picture's only row away.
            projector: nn.Module = whole.multi_modal_projector
            projector.register_forward_hook(lambda _, __, rows: rows[None] if len(rows) == 1 else rows)
        self.whole = whole
        self._state = set(whole.state_dict())
        self._device, self._dtype = device, dtype
        self._fill(model_config, device)
        self._pack()
        # PyTorch's products have other bits in other company.
        self._joins = family.joins_pictures and all(layer.packed is not None for layer in packed_layers(whole))

    def _fill(self, model_config: ModelConfig, device: torch.device) -> None:
        folder, lacking = Path(model_config.path), set(self._state)
        if model_config.load_format == "dummy":
            for name, value in self.whole.state_dict().items():
                self._put(name, dummy_weight(name, tuple(value.shape), value.dtype, "cpu", model_config.seed), device)
        else:
            for name, tensor in self._names.convert(_of_pictures(iterate_tensors(tower_files(folder)))):
                own = self._own(name)
                if own in lacking and isinstance(tensor, Tensor):
                    self._put(own, tensor, device)
                    lacking.discard(own)
                elif name.endswith(_QUANTIZED) and own.rpartition(".")[0] + ".weight" in lacking:
                    raise ValueError(f"{folder.name}: {name} is quantised, and a picture tower's weights must be plain")
            if lacking:
                shown = ", ".join(sorted(lacking)[:5])
                raise ValueError(f"{folder.name} lacks {len(lacking)} weights of the picture tower: {shown}")
        for module in self.whole.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)

    def _pack(self) -> None:
        for layer in packed_layers(self.whole):
            layer.pack()

    def _own(self, name: str) -> str:
        """The name without the place of this model in the one with a head."""
        return name.removeprefix("model.") if name not in self._state else name

    def _put(self, name: str, tensor: Tensor, device: torch.device) -> None:
        place, _, last = name.rpartition(".")
        module = self.whole.get_submodule(place)
        if isinstance(module, Packed):
            module.unpack()
        before = getattr(module, last)
        if before.shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, but config.json means {tuple(before.shape)}"
            raise ValueError(f"the picture tower's {name} has shape {shapes}")
        value = tensor.to(device=device, dtype=before.dtype, copy=True)
        if last in module._parameters:
            module._parameters[last] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[last] = value

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """New values for some, by their checkpoint names; those of other parts are left alone."""
        try:
            for name, tensor in self._names.convert(_of_pictures(weights)):
                own = self._own(name)
                if own in self._state and isinstance(tensor, Tensor):
                    self._put(own, tensor, self._device)
        finally:
            self._pack()

    def runs(self, pictures: Sequence[Mapping[str, Tensor]]) -> Iterator[list[int]]:
        """The numbers of these pictures, by their arguments, in the runs that `encode_together` should take."""
        run: list[int] = []
        room = 0
        for number, values in enumerate(pictures):
            joins = self._joins and values.keys() == _JOINED
            count = len(values["pixel_values"]) if joins else _PATCHES_OF_A_RUN
            if run and count > room:
                yield run
                run = []
            room = (room if run else _PATCHES_OF_A_RUN) - count
            run.append(number)
        if run:
            yield run

    def encode_together(self, pictures: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The rows of a run of `runs`, one picture's after the other's; see `encode`."""
        if len(pictures) == 1:
            return self.encode(pictures[0])
        return self.encode({name: torch.cat([values[name] for values in pictures]) for name in _JOINED})

    def unsound_rows(self, count: int, width: int) -> Tensor:
        """Rows [count, width] of pictures that cannot be encoded: no value of them is a number."""
        return torch.full((count, width), torch.nan, dtype=self._dtype, device=self._device)

    @torch.inference_mode()
    def encode(self, values: Mapping[str, Tensor]) -> Tensor:
        """The rows of some pictures, or of a video, [N, L * W]: the decoder's W-wide embeddings, and beside each what
        is added to its stream after the first L - 1 layers. `values`: the processor's, by their names, or the rows
        themselves."""
        device, dtype = self._device, self._dtype
        if ROWS in values:
            return values[ROWS].to(device, dtype)
        is_video = not self._video_arguments.isdisjoint(values.keys() - self._arguments)
        known = self._video_arguments if is_video else self._arguments
        given = {
            name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
            for name, value in values.items()
            if name in known
        }
        features = self.whole.get_video_features if is_video else self.whole.get_image_features
        found = features(**given, return_dict=True)
        pooled = found.pooler_output
        if pooled is None and hasattr(self.whole, "multi_modal_projector"):
            # Llama 4's projector is no part of what this returns.
            pooled = self.whole.multi_modal_projector(found.last_hidden_state)
        further: Any = getattr(found, "deepstack_features", None) or ()
        if pooled is None:
            # Granite 4's tokens begin as zeros, and parts say before which layer they are added.
            further = [each for _, each in sorted(dict(further).items())]
            pooled = torch.zeros_like(_rows(further[0]))
        parts = [pooled, *further]
        rows = torch.cat([_rows(part).to(dtype) for part in parts], dim=1)
        if ROW_KINDS not in values:
            return rows
        kinds = values[ROW_KINDS].to(device)
        both = torch.cat([rows, found.visual_indicator_features.to(dtype)])
        # The picture's rows in their order, and each marker's after them.
        return both[(kinds + len(rows) - 1).where(kinds > 0, (kinds == 0).cumsum(0) - 1)]


def _of_pictures(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are not the text decoder's."""
    return ((name.removeprefix("vlm."), tensor) for name, tensor in tensors if text_tensor_name(name) is None)


def _rows(features: Any) -> Tensor:
    """[N, W] of one picture's or several pictures' features, a tensor or one for each."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([_rows(each) for each in features])
