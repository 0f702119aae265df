"""The parts of a decoder that one stage has: some of its layers; the first stage embeds, and the last has the head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from vllm.distributed.stages import get_stage
from vllm.layers.absent import AbsentPart
from vllm.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def make_embedding(vocab_size: int, width: int, is_tied: bool) -> Any:
    """The embedding where a stage needs it: the last one, too, if the head is tied to it."""
    stage, make = get_stage(), partial(VocabParallelEmbedding, vocab_size, width)
    return make() if stage.embeds or (stage.is_last and is_tied) else AbsentPart(make)


def make_head(vocab_size: int, width: int, tied_to: Any, *options: Any) -> Any:
    """The last stage's head; elsewhere none, whatever it is tied to."""
    if get_stage().is_last:
        return ParallelLMHead(vocab_size, width, tied_to, *options)
    return AbsentPart(partial(ParallelLMHead, vocab_size, width, None, *options))


def make_layers(make: Callable[[int, bool], nn.Module], count: int) -> list[nn.Module]:
    """All layers of a model, those of other stages absent. `make`: makes a layer, by its number and whether it is this
    stage's."""
    own = get_stage().layers
    if own is None:
        return [make(index, True) for index in range(count)]
    return [make(index, True) if index in own else AbsentPart(partial(make, index, False)) for index in range(count)]
