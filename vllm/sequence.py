"""Older paths of the readings' types, and tensors between the parts of a model."""

from __future__ import annotations

from collections.abc import ItemsView
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logprobs import Logprob, PromptLogprobs, SampleLogprobs

if TYPE_CHECKING:
    import torch


@dataclass
class IntermediateTensors:
    """Named tensors that one stage of a pipeline hands to the next; there is one stage here."""

    tensors: dict[str, torch.Tensor]

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.tensors[key] = value

    def __len__(self) -> int:
        return len(self.tensors)

    def items(self) -> ItemsView[str, torch.Tensor]:
        """(name, tensor) of each."""
        return self.tensors.items()


__all__ = ["IntermediateTensors", "Logprob", "PromptLogprobs", "SampleLogprobs"]
