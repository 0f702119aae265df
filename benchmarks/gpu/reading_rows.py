"""Rows of the table: the reading kernel, and prompt readings through the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpu.setting import Case, Setting, make_row
from gpu.state_rows import measure_swap, measure_top_p
from gpu.timing import synchronize, time_in_turns
from vllm.ops._dispatch import force
from vllm.ops.count_above import count_above
from vllm.ops.token_readings import RowReadings, token_readings

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MIB = 2**20


def make_cases(setting: Setting) -> dict[str, Case]:
    """The reading kernel by dtype, then prompt readings, and what else a step's kernels do outside of the model."""
    cases: dict[str, Case] = {f"readings {name}": lambda name=name: _readings(setting, name) for name in _DTYPES}
    cases["prompt readings"] = lambda: _prompt_readings(setting)
    cases["teacher readings"] = lambda: _teacher_readings(setting)
    cases["descriptors"] = lambda: _descriptors(setting)
    cases["tiles"] = lambda: _tiles(setting)
    cases["prompt against output"] = lambda: _prompt_against_output(setting)
    cases["top-p"] = lambda: measure_top_p(setting)
    cases["swapped blocks"] = lambda: measure_swap(setting)
    return cases


@torch.inference_mode()
def _readings(setting: Setting, name: str) -> dict[str, Any]:
    sizes, generator = setting.sizes, setting.generator()
    rows, vocab_size = sizes.reading_rows, sizes.shape.vocab_size
    inputs = []
    for _ in range(sizes.copies):
        logits = torch.randn(rows, vocab_size, device=setting.device, generator=generator).to(_DTYPES[name])
        ids = torch.randint(vocab_size, (rows, sizes.num_ids), device=setting.device, generator=generator)
        inputs.append((logits, ids.int()))

    def on_each(read: Callable[[Tensor, Tensor], object]) -> list[Callable[[], object]]:
        return [lambda logits=logits, ids=ids: read(logits, ids) for logits, ids in inputs]

    with force("triton"):
        seconds = time_in_turns(
            {"kernel": on_each(token_readings), "torch": on_each(_read_with_torch), "passes": on_each(_read_in_passes)},
            setting.device,
            sizes.repeats,
        )
    num_bytes = inputs[0][0].nbytes
    work = f"{sizes.num_ids} ids and ranks of [{rows}, {vocab_size:,}] {name}"
    share = num_bytes / seconds["kernel"] / setting.rates["copy_bytes_per_second"]
    return {
        **{f"{each}_seconds": value for each, value in seconds.items()},
        "bytes": num_bytes,
        "rows": [
            make_row(f"readings_{name}", work, share, 0.85, "of copy bandwidth"),
            make_row(
                f"readings_{name}_torch",
                f"{work}, against log_softmax, gather, topk and rank counting in torch",
                seconds["torch"] / seconds["kernel"],
                5.0,
                "x",
            ),
            make_row(
                f"readings_{name}_passes",
                f"{work}, against a pass each for max, sum-exp and ranks",
                seconds["passes"] / seconds["kernel"],
                2.5,
                "x",
            ),
        ],
    }


def _read_with_torch(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Readings by torch operations; the kernel also gives the most likely token."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, ids.long())
    best = logprobs.topk(1, dim=-1)
    ranks = torch.stack([(logprobs > column[:, None]).sum(dim=-1) for column in chosen.unbind(1)], dim=1)
    return chosen, best.values, best.indices, ranks + 1


def _read_in_passes(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Each result by its own kernel."""
    highest = logits.amax(dim=-1)
    lse = logits.logsumexp(dim=-1)
    chosen = logits.gather(1, ids.long()).float()
    return highest, lse, chosen, count_above(logits, chosen)


def _prompt_inputs(setting: Setting, hidden_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, H], the head's weight [V, H], and a token at each position [T, 1]."""
    sizes, shape, generator = setting.sizes, setting.sizes.shape, setting.generator()
    weight = torch.randn(shape.vocab_size, hidden_size, device=setting.device, generator=generator)
    weight = (weight * hidden_size**-0.5).bfloat16()
    hidden = torch.randn(sizes.prompt_tokens, hidden_size, device=setting.device, generator=generator).bfloat16()
    ids = torch.randint(
        shape.vocab_size, (sizes.prompt_tokens, 1), device=setting.device, generator=generator, dtype=torch.int32
    )
    return hidden, weight, ids


@torch.inference_mode()
def _prompt_readings(setting: Setting) -> dict[str, Any]:
    from vllm.ops.linear_readings import linear_readings

    sizes, shape = setting.sizes, setting.sizes.shape
    hidden, weight, ids = _prompt_inputs(setting, setting.sizes.shape.hidden_size)
    out = torch.empty(sizes.prompt_tokens, shape.vocab_size, dtype=torch.bfloat16, device=setting.device)
    with force("triton"):
        largest = _largest_allocation(setting, lambda: linear_readings(hidden, weight, ids))
        seconds = time_in_turns(
            {
                "readings": [lambda: linear_readings(hidden, weight, ids)],
                "gemm": [lambda: torch.mm(hidden, weight.T, out=out)],
            },
            setting.device,
            sizes.repeats,
            # Products of this size keep the host far ahead of the device.
            graphs=False,
        )
    work = f"the prompt token of {sizes.prompt_tokens:,} positions x {shape.vocab_size:,}"
    flops = 2 * sizes.prompt_tokens * shape.vocab_size * shape.hidden_size
    return {
        **{f"{each}_seconds": value for each, value in seconds.items()},
        "gemm_of_matrix_rate": flops / seconds["gemm"] / setting.rates["matrix_flops_per_second"],
        **largest,
        "rows": [
            make_row(
                "prompt_readings",
                f"{work}, against the product with lm_head alone",
                seconds["readings"] / seconds["gemm"],
                1.15,
                "x",
                at_least=False,
            ),
            make_row(
                "prompt_readings_memory",
                f"{work}: memory beside inputs, MiB",
                largest["peak_bytes"] / _MIB,
                256.0,
                "MiB",
                at_least=False,
            ),
        ],
    }


@torch.inference_mode()
def _descriptors(setting: Setting) -> dict[str, Any]:
    """Where the device fetches tiles by descriptors: against programs that compute addresses."""
    from vllm.ops.linear_readings import linear_readings
    from vllm.ops.triton import descriptors

    if not descriptors.are_fetched():
        return {"fetched": False, "rows": []}
    inputs = _prompt_inputs(setting, setting.sizes.shape.hidden_size)

    def by_addresses() -> RowReadings:
        with mock.patch.object(descriptors, "are_fetched", lambda: False):
            return linear_readings(*inputs)

    with force("triton"):
        pairs = zip(linear_readings(*inputs)[:5], by_addresses()[:5], strict=True)
        same_bits = all(torch.equal(*pair) for pair in pairs)
        calls: dict[str, list[Callable[[], object]]] = {
            "described": [lambda: linear_readings(*inputs)],
            "addresses": [by_addresses],
        }
        seconds = time_in_turns(calls, setting.device, setting.sizes.repeats, graphs=False)
    work = f"the prompt token of {setting.sizes.prompt_tokens:,} positions: tiles by descriptors against addresses"
    value = seconds["described"] / seconds["addresses"]
    row = make_row("prompt_readings_described", work, value, 1.0, "x", at_least=False)
    return {"fetched": True, "same_bits": same_bits, **seconds, "rows": [row]}


@torch.inference_mode()
def _tiles(setting: Setting) -> dict[str, Any]:
    """Where the hidden size decides whether two programs share a processor: both ways, below and above the limit."""
    from vllm.ops.linear_readings import linear_readings
    from vllm.ops.triton import descriptors
    from vllm.ops.triton import linear_readings as kernel

    if setting.device.type != "cuda" or descriptors.architecture() // 10 != 9:
        return {"not_here": "tiles do not depend on the hidden size on this device"}
    limits, seconds = {"two": 2**31, "one": 0}, {}
    for size in (512, 1024, 1536, 2048, 4096):
        inputs = _prompt_inputs(setting, size)

        def read(limit: int, inputs: tuple[Tensor, ...] = inputs) -> RowReadings:
            with mock.patch.object(kernel, "_SMALL_HIDDEN_SIZE", limit):
                return linear_readings(*inputs)

        calls: dict[str, list[Callable[[], object]]] = {
            name: [lambda limit=limit, read=read: read(limit)] for name, limit in limits.items()
        }
        with force("triton"):
            seconds[size] = time_in_turns(calls, setting.device, setting.sizes.repeats, graphs=False)
    ratios = {size: each["two"] / each["one"] for size, each in seconds.items()}
    worst = max(ratio if size <= kernel._SMALL_HIDDEN_SIZE else 1 / ratio for size, ratio in ratios.items())
    work = "the prompt token by the tile that the hidden size decides on, against the other: the worst of five sizes"
    row = make_row("prompt_readings_tiles", work, worst, 1.02, "x", at_least=False)
    return {"limit": kernel._SMALL_HIDDEN_SIZE, "two_against_one": ratios, "rows": [row]}


@torch.inference_mode()
def _prompt_against_output(setting: Setting) -> dict[str, Any]:
    """The same positions, read as a prompt's and as generated ones: by two kernels, whose sums have other orders."""
    from vllm.ops.float_linear import float_linear
    from vllm.ops.linear_readings import linear_readings

    sizes, shape, generator = setting.sizes, setting.sizes.shape, setting.generator()
    hidden, weight = (
        torch.randn(rows, shape.hidden_size, device=setting.device, generator=generator)
        for rows in (sizes.reading_rows, shape.vocab_size)
    )
    hidden, weight = hidden.bfloat16(), (weight * shape.hidden_size**-0.5).bfloat16()
    size = (sizes.reading_rows, sizes.num_ids)
    ids = torch.randint(shape.vocab_size, size, device=setting.device, generator=generator, dtype=torch.int32)
    with force("triton"):
        prompt, output = linear_readings(hidden, weight, ids), token_readings(float_linear(hidden, weight), ids)
    difference = (prompt.logits - prompt.lse[:, None]) - (output.logits - output.lse[:, None])
    work = (
        f"{sizes.num_ids} ids at {sizes.reading_rows} positions as a prompt's and as an output's: greatest difference"
    )
    value = difference.abs().max().item()
    return {
        "same_ranks": (prompt.ranks == output.ranks).double().mean().item(),
        "rows": [make_row("prompt_against_output", work, 1e6 * value, 10.0, "1e-6 nats", at_least=False)],
    }


@torch.inference_mode()
def _teacher_readings(setting: Setting) -> dict[str, Any]:
    """Other ids at each position, with their ranks and without."""
    from vllm.ops.linear_readings import linear_readings

    sizes, shape = setting.sizes, setting.sizes.shape
    hidden, weight, _ = _prompt_inputs(setting, shape.hidden_size)
    num_ids = min(sizes.teacher_ids, shape.vocab_size)
    ids = torch.randint(shape.vocab_size, (sizes.prompt_tokens, 1 + num_ids), device=setting.device, dtype=torch.int32)
    out = torch.empty(sizes.prompt_tokens, shape.vocab_size, dtype=torch.bfloat16, device=setting.device)
    with force("triton"):
        seconds = time_in_turns(
            {
                "ranked": [lambda: linear_readings(hidden, weight, ids)],
                "rankless": [lambda: linear_readings(hidden, weight, ids, ranks=False)],
                "gemm": [lambda: torch.mm(hidden, weight.T, out=out)],
            },
            setting.device,
            sizes.repeats,
            graphs=False,
        )
    work = f"{num_ids} ids at each of {sizes.prompt_tokens:,} positions x {shape.vocab_size:,}"
    rows = {"ranked": ("with ranks", 8.0), "rankless": ("without ranks", 1.6)}
    return {
        **{f"{each}_seconds": value for each, value in seconds.items()},
        "rows": [
            make_row(
                f"teacher_{name}",
                f"{work} {what}, against the product with lm_head alone",
                seconds[name] / seconds["gemm"],
                target,
                "x",
                at_least=False,
            )
            for name, (what, target) in rows.items()
        ],
    }


def _largest_allocation(setting: Setting, call: Callable[[], object]) -> dict[str, int]:
    """Peak of the bytes that a call allocates, an upper bound of its largest allocation."""
    call()
    synchronize(setting.device)
    if setting.device.type != "cuda":
        return {"peak_bytes": 0}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize(setting.device)
    return {"peak_bytes": torch.cuda.max_memory_allocated() - before}
