"""Serve requests on a pretended GPU; print which variants of Triton's kernels are asked for at the start, and later, by
how weights and cache are held.

Run as a program: Triton must not interpret here, and needs no device. Wrappers launch as ever, but nothing is compiled
or run: what a launch would compile is noted, and the reference computes.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pretend_cuda
import pytest
from pretend_tensors import held
from ptx_launches import pretend_capability
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from triton.runtime.jit import JITFunction

from vllm import SamplingParams

_KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"repetition_penalty": 1.2, "logit_bias": {9: 1.0}},
    {"presence_penalty": 0.5, "min_tokens": 1},
]


# How weights and cache are held, and the sizes of batches.
_HELD: list[tuple[str, dict[str, Any], Sequence[int]]] = [
    ("plain", {}, (1, 2, 5, 19, 8, 3)),
    ("8 bits", {"quantization": "fp8", "kv_cache_dtype": "fp8"}, (2, 19)),
]

_RUN = JITFunction.run
_seen: set[tuple[str, str]] = set()
"""A kernel's name, and what is compiled for a launch."""
_LEAVE_OUT = pretend_cuda._leave_out


def _note(kernel: JITFunction, key: Any, *args: Any, **kwargs: Any) -> None:
    """Stands for the compilation."""
    _seen.add((kernel.__name__, str(key)))


def _launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stands for the launch."""
    _RUN(kernel, *args, grid=grid, warmup=True, **kwargs)


def _launch_and_leave_out(
    patch: pytest.MonkeyPatch, mode: Any, operation: Callable[..., Any], kernels: ModuleType, name: str
) -> None:
    """A kernel's wrapper runs for what it launches, and the reference for the results."""
    wrapper = getattr(kernels, name)
    _LEAVE_OUT(patch, mode, operation, kernels, name)
    reference = getattr(kernels, name)

    def both(*args: Any) -> Any:
        with _disable_current_modes():
            wrapper(*tree_map(held, args))
        return reference(*args)

    patch.setattr(kernels, name, both)


def _requests(random_: random.Random, count: int, vocab_size: int) -> tuple[list[Any], list[SamplingParams]]:
    """A batch of any shape: short and long prompts, and every kind of sampling and reading."""
    prompts, params = [], []
    for _ in range(count):
        prompts.append(
            {"prompt_token_ids": random_.choices(range(3, vocab_size), k=random_.choice((1, 2, 7, 16, 33, 530)))}
        )
        fields = {"temperature": 0, "ignore_eos": True, "max_tokens": random_.randint(1, 5), **random_.choice(_KINDS)}
        if random_.random() < 0.6:
            fields["logprobs"] = random_.choice((0, 1, 3, 20, 33, 70, -1))
        if random_.random() < 0.5:
            fields["logprob_token_ids"] = random_.sample(
                range(vocab_size), random_.choice((1, 2, 16, 17, 64, 129, 200))
            )
        if random_.random() < 0.3:
            fields["logprob_entropy"] = "logprobs" in fields or "logprob_token_ids" in fields
        if random_.random() < 0.2:
            fields["prompt_logprobs"] = random_.choice((0, 1, 5, 40))
        elif random_.random() < 0.3:
            fields["prompt_logprob_token_ids"] = random_.sample(range(vocab_size), random_.choice((1, 2, 20)))
        params.append(SamplingParams(**fields))
    return prompts, params


def _count(llm: Callable[[], Any], counts: Sequence[int], seed: int) -> dict[str, list[Any]]:
    """The variants of the start, and those that came later, with batches of so many requests."""
    _seen.clear()
    engine, random_ = llm(), random.Random(seed)
    at_start = set(_seen)
    vocab_size = engine.llm_engine.vllm_config.model_config.vocab_size
    for count in counts:
        prompts, params = _requests(random_, count, vocab_size)
        engine.generate(prompts, params, use_tqdm=False)
    return {"at_start": sorted(at_start), "later": sorted(_seen - at_start)}


def main() -> None:
    """Print what is counted."""
    from models_util import make_random_model
    from tiny_llm import make_tiny_llm

    pretend_capability(90)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # Rows of an odd vocabulary are aligned each in its way; contexts of 512 and more are split.
        path, _ = make_random_model("qwen3", "small", Path(folder), vocab_size=203, max_position_embeddings=640)
        for context in (
            mock.patch.object(pretend_cuda, "_leave_out", _launch_and_leave_out),
            mock.patch.object(JITFunction, "_do_compile", _note),
            mock.patch.object(JITFunction, "run", _launch),
            pretend_cuda.pretending(),
        ):
            stack.enter_context(context)
        fields = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 20, "max_logprob_token_ids": -1}
        fields |= {"skip_tokenizer_init": True, "max_model_len": 640, "max_num_batched_tokens": 64}
        counted = {
            name: _count(partial(make_tiny_llm, path, **fields, **others), counts, int(sys.argv[1]))
            for name, others, counts in _HELD
        }
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
