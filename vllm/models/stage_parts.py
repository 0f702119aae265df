"""The parts of a decoder that one stage has: some of its layers; the first stage embeds, and the last has the head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from vllm import envs
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.stages import get_stage, layers_as_asked, split_layers
from vllm.layers.absent import AbsentPart
from vllm.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def make_embedding(vocab_size: int, width: int, is_tied: bool) -> Any:
    """The embedding where a stage needs it: the first one's, and the last one's if the head is tied to it."""
    stage, make = get_stage(), partial(VocabParallelEmbedding, vocab_size, width)
    return make() if stage.is_first or (stage.is_last and is_tied) else AbsentPart(make)


def make_head(vocab_size: int, width: int, tied_to: Any, *options: Any) -> Any:
    """The last stage's head; elsewhere none, whatever it is tied to."""
    if get_stage().is_last:
        return ParallelLMHead(vocab_size, width, tied_to, *options)
    return AbsentPart(partial(ParallelLMHead, vocab_size, width, None, *options))


def make_layers(make: Callable[[int, bool], nn.Module], count: int, vocab_values: int) -> list[nn.Module]:
    """All layers of a model, those of other stages absent.

    Args:
        make: makes a layer, by its number and whether it is this stage's.
        vocab_values: values of the embedding, and of the head.

    Raises:
        ValueError: there are more stages than layers, or VLLM_PP_LAYER_PARTITION does not fit them.
    """
    stage = get_stage()
    if stage.size == 1:
        return [make(index, True) for index in range(count)]
    absent = [AbsentPart(partial(make, index, False)) for index in range(count)]
    asked = envs.layer_partition()
    if asked is not None:
        stages = layers_as_asked(asked, count, stage.size)
    else:
        vocab_bytes = vocab_values * torch.get_default_dtype().itemsize // get_tp_group().world_size
        stages = split_layers([each.num_bytes for each in absent], vocab_bytes, vocab_bytes, stage.size)
    own = stages[stage.index]
    return [make(index, True) if index in own else absent[index] for index in range(count)]
