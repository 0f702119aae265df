"""New weights for a model that serves, for callers that begin and end an update themselves."""

from __future__ import annotations

from typing import Any

from torch import nn


def initialize_layerwise_reload(model: nn.Module) -> None:
    """Nothing: model.load_weights keeps what is incomplete until the rest comes."""


def finalize_layerwise_processing(model: nn.Module, model_config: Any) -> None:
    """Check that what was loaded is whole.

    Raises:
        ValueError: parts of a layer have come and others not.
    """
    updater: Any = model.weight_updater
    updater.complete()
