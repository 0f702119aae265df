"""A model with a tower of texts and one of pictures, whose vectors are compared: CLIP (arXiv:2103.00020), SigLIP
(arXiv:2303.15343) and SigLIP 2 (arXiv:2502.14786), as transformers' module."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm.config.checkpoint.auto_config import describe, load_auto_config
from vllm.config.checkpoint.config import HFConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.linear_method import UNQUANTIZED
from vllm.layers.weight_update import UpdatableModel, WeightUpdater
from vllm.models.vision.layers import ATTENTION, Packed, packed_layers, register_attention, use_own_layers
from vllm.tokenizers.tokenizer import get_tokenizer

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# Their texts are always as long as the table of positions, with padding that is seen.
_PADDED = ("siglip", "siglip2")


class PairEmbedder(UpdatableModel):
    """Makes one vector of a text or of a picture, projected, not normalised."""

    @staticmethod
    def load_config(raw: dict[str, Any], folder: Path, generation: dict[str, Any], trust_remote_code: bool) -> HFConfig:
        """The configuration: hidden_size is the vectors' length, max_context_len the longest text.

        Raises:
            ValueError: transformers cannot use it.
        """
        auto = load_auto_config(raw, folder, trust_remote_code)
        text = auto.text_config
        size = getattr(auto, "projection_dim", None) or text.projection_size
        geometry = {
            "hidden_size": size,
            "vocab_size": text.vocab_size,
            "num_hidden_layers": text.num_hidden_layers,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": text.num_attention_heads,
            "head_dim": text.hidden_size // text.num_attention_heads,
        }
        return replace(describe(text, geometry, raw, generation), is_encoder=True, pools_itself=True)

    def __init__(self, config: ModelConfig, device: torch.device, takes_adapters: bool = False) -> None:
        """
        Raises:
            ValueError: several ranks, adapters, quantised weights, or some that are missing.
        """
        super().__init__()
        import transformers

        _check(config, takes_adapters)
        raw, folder, dtype = config.hf_config.raw, Path(config.path), getattr(torch, config.dtype)
        auto = load_auto_config(raw, folder, config.trust_remote_code)
        make: Any = getattr(transformers, config.architecture)
        register_attention()
        if config.load_format == "dummy":
            torch.manual_seed(config.seed)
            model = make._from_config(auto, dtype=dtype, attn_implementation=ATTENTION)
        else:
            model, info = make.from_pretrained(
                config.path, config=auto, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True
            )
            if missing := sorted(info["missing_keys"]):
                raise ValueError(f"{folder.name} lacks weights: {', '.join(missing[:5])}")
        self.model = model.requires_grad_(False).to(device).eval()
        self._device, self._dtype = device, dtype
        self.weight_updater = WeightUpdater(self, UNQUANTIZED)
        self._shapes = {name: value.shape for name, value in self.model.state_dict().items()}
        self._of_pictures = set(inspect.signature(self.model.get_image_features).parameters)
        self._tokenizer: Any = None
        self._length = auto.text_config.max_position_embeddings
        if auto.model_type in _PADDED:
            tokenizer = get_tokenizer(
                config.tokenizer, trust_remote_code=config.trust_remote_code, revision=config.tokenizer_revision
            )
            self._tokenizer = tokenizer.hf_tokenizer
        use_own_layers(self.model)
        self._pack()

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        types: Tensor,
        lengths: Sequence[int],
        attended: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """The vector of each text, [1, D]. See EncoderForPooling; texts of equal length are computed together."""
        results: list[Tensor] = []
        start = 0
        for length, same in groupby(lengths):
            count = len(list(same))
            rows = ids[start : start + count * length].view(count, length)
            start += count * length
            found = self.model.get_text_features(**self._inputs(rows), return_dict=True)
            results += found.pooler_output.unsqueeze(1)
        return results

    def _inputs(self, rows: Tensor) -> dict[str, Tensor]:
        """Token ids [B, L] as transformers' processor gives them to the module."""
        if self._tokenizer is None:
            return {"input_ids": rows}
        padded = self._tokenizer.pad(
            {"input_ids": rows.tolist()}, padding="max_length", max_length=self._length, return_tensors="pt"
        )
        return {name: padded[name].to(self._device) for name in ("input_ids", "attention_mask") if name in padded}

    @torch.inference_mode()
    def embed_picture(self, values: Mapping[str, Tensor]) -> Tensor:
        """The vector of a picture, [1, D]. `values`: the processor's, by their names."""
        given = {
            name: value.to(self._device, self._dtype) if value.is_floating_point() else value.to(self._device)
            for name, value in values.items()
            if name in self._of_pictures
        }
        found: Tensor = self.model.get_image_features(**given, return_dict=True).pooler_output
        return found

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """New values for some weights, by their checkpoint names, which it returns.

        Raises:
            ValueError: a name that the model does not have, or another shape: none is taken.
        """
        checked = list(weights)
        for name, value in checked:
            if name not in self._shapes:
                raise ValueError(f"load_weights: the model has no weight {name}")
            if value.shape != self._shapes[name]:
                wanted, got = tuple(self._shapes[name]), tuple(value.shape)
                raise ValueError(f"load_weights: {name} must have shape {wanted}, got {got}")
        for name, value in checked:
            place, _, last = name.rpartition(".")
            module = self.model.get_submodule(place)
            if isinstance(module, Packed):
                module.unpack()
            getattr(module, last).data.copy_(value)
            self.weight_updater.version += 1
        self._pack()
        return {name for name, _ in checked}

    def _pack(self) -> None:
        for layer in packed_layers(self.model):
            layer.pack()


def _check(config: ModelConfig, takes_adapters: bool) -> None:
    problem = ""
    if (ranks := get_tp_group().world_size) > 1:
        problem = f"tensor_parallel_size={ranks}: data_parallel_size starts a replica on each device"
    elif config.quantization is not None:
        problem = f"quantization={config.quantization!r}: use the unquantised model, without quantization"
    elif takes_adapters:
        problem = "enable_lora=True: leave it out"
    if problem:
        raise ValueError(f"{config.architecture}, which runs as transformers' module, does not support {problem}")
