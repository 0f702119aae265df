"""A quantisation as the layers see it: the interface that upstream's plug-ins write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn


class QuantizeMethodBase(ABC):
    """A layer's weight, and the product with it."""

    @abstractmethod
    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        """Register the layer's parameters; a checkpoint's tensors of their names fill them."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output."""

    def embedding(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Rows of the layer's weight. NotImplementedError: the method has none."""
        raise NotImplementedError(f"{type(self).__name__} gives no embeddings")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Called once when all of the layer's parameters are filled."""
        return


class QuantizationConfig(ABC):
    """A quantisation's settings: the content of a model's quantization_config."""

    def __init__(self) -> None:
        # Each fused layer has the checkpoint's own ones here.
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self) -> str:
        """Its value of `quantization`."""

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes that the model may have."""

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int:
        """The least compute capability of a GPU, as 70 for 7.0; -1: any."""

    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]:
        """Files of a model folder that may hold the settings when config.json does not."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """From the content of quantization_config. ValueError: settings that cannot be honoured."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of the layer called `prefix`; None: it is not quantised."""

    @staticmethod
    def get_from_keys(config: dict[str, Any], keys: list[str]) -> Any:
        """The value of the first of `keys` that `config` has. ValueError: it has none."""
        for key in keys:
            if key in config:
                return config[key]
        raise ValueError(f"quantization_config has none of {', '.join(keys)}")

    @staticmethod
    def get_from_keys_or(config: dict[str, Any], keys: list[str], default: Any) -> Any:
        """The value of the first of `keys` that `config` has, else `default`."""
        return next((config[key] for key in keys if key in config), default)
