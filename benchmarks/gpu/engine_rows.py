"""The engine on random weights: logits and rows of the table against transformers, and the cost of ids."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from bounds import ModelShape

from gpu import all_reduce, lost_rank
from gpu.model_folder import load_in_transformers, write_config
from gpu.setting import Case, Setting, make_row
from gpu.timing import synchronize
from vllm import LLM, SamplingParams

# Enough for the largest batch's cache beside that of transformers.
_MEMORY_SHARE = 0.4
_WARM_UP_TOKENS = 4


def make_cases(setting: Setting) -> dict[str, Case]:
    """Correctness of the logits, then speed."""
    models = _Models(setting)
    cases: dict[str, Case] = {
        f"logits {name}": lambda name=name, shape=shape: _compare_logits(setting, name, shape)
        for name, shape in setting.sizes.models.items()
    }
    cases["prompts as outputs"] = lambda: _same_bits(setting)
    cases["kernels at the start"] = lambda: _late_compilations(setting, models)
    cases["decode host time"] = lambda: _host_share(setting, models)
    cases["prompts' host time"] = lambda: _prompt_host_share(setting, models)
    cases["pieces"] = lambda: _pieces(setting, models)
    cases["all reduce"] = lambda: _all_reduce(setting)
    cases["lost rank"] = lambda: _lost_rank(setting, models)
    cases["decode with ids"] = lambda: _cost_of_ids(setting, models)
    for batch in setting.sizes.batches:
        cases[f"decode {batch}"] = lambda batch=batch: _against_transformers(setting, models, batch)
    return cases


class _Models:
    """The engine and transformers with the smallest model, each made on first use."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._num_prompts = 0
        folder = write_config(setting.folder / "rows", setting.sizes.shape)
        self.engine = cache(lambda: _make_engine(setting, folder))
        self.transformers = cache(lambda: load_in_transformers(folder, setting.device, setting.seed, torch.bfloat16))

    def prompts(self, batch: int) -> list[list[int]]:
        """New prompts, without cached prefixes."""
        self._num_prompts += 1
        generator = torch.Generator().manual_seed(self._setting.seed + self._num_prompts)
        sizes = self._setting.sizes
        return torch.randint(sizes.shape.vocab_size, (batch, sizes.prompt_len), generator=generator).tolist()


def _make_engine(setting: Setting, folder: Path, **fields: Any) -> LLM:
    sizes = setting.sizes
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=setting.device.type,
        dtype="bfloat16",
        seed=setting.seed,
        max_model_len=sizes.prompt_len + sizes.max_tokens,
        max_num_seqs=max(sizes.batches),
        gpu_memory_utilization=_MEMORY_SHARE,
        max_logprobs=-1,
        **fields,
    )


def _generate(llm: LLM, prompts: list[list[int]], max_tokens: int, **fields: Any) -> float:
    """Seconds for exactly `max_tokens` tokens a prompt."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **fields)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    return seconds


def _same_bits(setting: Setting) -> dict[str, Any]:
    """Generated positions, read again as a prompt's, with VLLM_BATCH_INVARIANT=1."""
    sizes = setting.sizes
    generator = torch.Generator().manual_seed(setting.seed)
    prompts = torch.randint(sizes.shape.vocab_size, (3, sizes.prompt_len), generator=generator).tolist()
    ids, count = list(range(sizes.num_ids)), min(8, sizes.max_tokens - 1)
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    try:
        llm = _make_engine(setting, write_config(setting.folder / "invariant", sizes.shape))
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprob_token_ids=ids)
        written = llm.generate(prompts, params, use_tqdm=False)
        whole = [[*prompt, *each.outputs[0].token_ids] for prompt, each in zip(prompts, written, strict=True)]
        read = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprob_token_ids=ids), use_tqdm=False)
    finally:
        del os.environ["VLLM_BATCH_INVARIANT"]
    differing = sum(
        int((own.outputs[0].logprobs.select(ids).logits != other.prompt_logprobs.select(ids).logits[-count:]).sum())
        for own, other in zip(written, read, strict=True)
    )
    del llm
    gc.collect()
    work = "logits of generated positions that differ in a bit when they are read as a prompt's, batch invariant"
    return {"rows": [make_row("prompts_as_outputs", work, float(differing), 0.0, "logits", at_least=False)]}


def _late_compilations(setting: Setting, models: _Models) -> dict[str, Any]:
    """The kernels that Triton compiles for batches of many shapes, once the engine has started."""
    import triton

    llm, sizes, compiled = models.engine(), setting.sizes, []
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "top_p": 0.9, "seed": 1},
        {"temperature": 1, "top_k": 5, "logprobs": 3, "seed": 2},
        {"temperature": 0, "logprob_token_ids": list(range(sizes.num_ids)), "logprobs": 0, "logprob_entropy": True},
        {"temperature": 0, "prompt_logprobs": 0},
        {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 40},
    ]
    names = triton.knobs.runtime
    before, names.jit_post_compile_hook = names.jit_post_compile_hook, lambda **fields: compiled.append(fields["repr"])
    try:
        for count in (1, 2, 5, max(sizes.batches)):
            params = [SamplingParams(max_tokens=3, detokenize=False, **kinds[row % len(kinds)]) for row in range(count)]
            llm.generate(models.prompts(count), params, use_tqdm=False)
    finally:
        names.jit_post_compile_hook = before
    work = "kernels that Triton compiles for batches of many shapes, after the start"
    rows = [make_row("late_compilations", work, float(len(compiled)), 0.0, "kernels", at_least=False)]
    return {"compiled": compiled, "rows": rows}


def _all_reduce(setting: Setting) -> dict[str, Any]:
    if setting.device.type != "cuda" or torch.cuda.device_count() < 2:
        return {"not_here": "there are no two devices"}
    seconds = all_reduce.measure("cuda")
    work = f"a sum of 64 KiB over two devices, launch included; NCCL alone: {1e6 * seconds['nccl']:.3g} us"
    return {**seconds, "rows": [make_row("all_reduce", work, 1e6 * seconds["ours"], 20.0, "us", at_least=False)]}


@contextlib.contextmanager
def _dispatches(llm: LLM) -> Iterator[list[float]]:
    """Seconds in which each step is dispatched, where steps run ahead."""
    worker = llm.llm_engine.engine_core.executor.worker
    spent: list[float] = []
    begin = worker.begin_step

    def timed(step: Any) -> Any:
        began = time.perf_counter()
        try:
            return begin(step)
        finally:
            spent.append(time.perf_counter() - began)

    worker.begin_step = timed
    try:
        yield spent
    finally:
        worker.begin_step = begin


def _lost_rank(setting: Setting, models: _Models) -> dict[str, Any]:
    if setting.device.type != "cuda" or torch.cuda.device_count() < 2:
        return {"not_here": "there are no two devices"}
    sizes = setting.sizes
    folder = write_config(setting.folder / "ranks", sizes.shape)
    seconds = lost_rank.measure(
        lambda: _make_engine(setting, folder, tensor_parallel_size=2),
        lambda llm: _generate(llm, models.prompts(min(sizes.batches)), sizes.max_tokens),
    )
    work = "two devices: from the end of one's process to the error of the call"
    return {"rows": [make_row("lost_rank", work, seconds, 30.0, "s", at_least=False)]}


def _prompt_host_share(setting: Setting, models: _Models) -> dict[str, Any]:
    """Prompts that are read: the time in which their steps are dispatched, of the time that they take."""
    llm, batch = models.engine(), max(setting.sizes.batches)
    for _ in range(2):
        prompts = models.prompts(batch)
        with _dispatches(llm) as spent:
            seconds = _generate(llm, prompts, 1, prompt_logprobs=0)
    if not spent:
        return {"not_here": "steps do not run ahead on this device"}
    work = f"{batch} prompts whose tokens are read: their steps' dispatch on the host, of the time of all"
    rows = [make_row("prompt_host_share", work, sum(spent) / seconds, 0.6, "of the time", at_least=False)]
    return {"host_seconds": spent, "seconds": seconds, "rows": rows}


def _pieces(setting: Setting, models: _Models) -> dict[str, Any]:
    """A step of a few hundred prompt tokens, replayed in pieces and launched kernel by kernel."""
    llm, sizes = models.engine(), setting.sizes
    runner = llm.llm_engine.engine_core.executor.worker.model_runner
    kept, count = getattr(runner.replay, "pieces", None), max(1, 512 // sizes.prompt_len)
    if kept is None:
        return {"not_here": "steps with prompts are not captured on this device"}
    seconds: dict[str, list[float]] = {"replayed": [], "launched": []}
    try:
        for repeat in range(4 * sizes.engine_repeats + 1):
            for kind in seconds if repeat % 2 else reversed(seconds):
                runner.replay.pieces = kept if kind == "replayed" else None
                spent = _generate(llm, models.prompts(min(count, max(sizes.batches))), 1)
                if repeat:
                    seconds[kind].append(spent)
    finally:
        runner.replay.pieces = kept
    ratio = statistics.median(seconds["launched"]) / statistics.median(seconds["replayed"])
    work = "a step of at most 512 prompt tokens, replayed in pieces, against launches of its kernels"
    return {"seconds": seconds, "rows": [make_row("pieces", work, ratio, 1.2, "x")]}


def _host_share(setting: Setting, models: _Models) -> dict[str, Any]:
    """The time in which a decode step is dispatched, of the time that steps take."""
    llm, sizes, batch = models.engine(), setting.sizes, min(setting.sizes.batches)
    _generate(llm, models.prompts(batch), sizes.max_tokens)
    prompts = _generate(llm, models.prompts(batch), 1)
    with _dispatches(llm) as spent:
        seconds = _generate(llm, models.prompts(batch), sizes.max_tokens)
    if not spent:
        return {"not_here": "steps do not run ahead on this device"}
    step = (seconds - prompts) / (sizes.max_tokens - 1)
    work = f"{batch} sequences: a decode step's dispatch on the host, of the step's time"
    rows = [make_row("decode_host_share", work, statistics.median(spent) / step, 0.6, "of a step", at_least=False)]
    return {"host_seconds": statistics.median(spent), "step_seconds": step, "rows": rows}


def _cost_of_ids(setting: Setting, models: _Models) -> dict[str, Any]:
    """In pairs of runs, so that both have the same clocks."""
    sizes, batch = setting.sizes, max(setting.sizes.batches)
    llm = models.engine()
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "ids": {"logprob_token_ids": list(range(1, 1 + sizes.num_ids))}}
    for fields in kinds.values():
        _generate(llm, models.prompts(batch), sizes.max_tokens, **fields)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repeat in range(2 * sizes.engine_repeats):
        for kind in kinds if repeat % 2 else reversed(kinds):
            seconds[kind].append(_generate(llm, models.prompts(batch), sizes.max_tokens, **kinds[kind]))
    ratio = statistics.median(ids / plain for ids, plain in zip(seconds["ids"], seconds["plain"], strict=True))
    work = f"{batch} sequences, {sizes.num_ids} ids at each token against none"
    return {"seconds": seconds, "rows": [make_row("decode_ids", work, ratio, 1.01, "x", at_least=False)]}


def _against_transformers(setting: Setting, models: _Models, batch: int) -> dict[str, Any]:
    sizes = setting.sizes
    llm, theirs = models.engine(), models.transformers()
    contenders: dict[str, Callable[[list[list[int]], int], float]] = {
        "ours": lambda prompts, max_tokens: _generate(llm, prompts, max_tokens),
        "transformers": lambda prompts, max_tokens: _generate_in_transformers(setting, theirs, prompts, max_tokens),
    }
    for run in contenders.values():
        run(models.prompts(batch), min(_WARM_UP_TOKENS, sizes.max_tokens))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range((sizes.engine_repeats + 1) // 2):
        for name in contenders if repeat % 2 else reversed(contenders):
            seconds[name].append(contenders[name](models.prompts(batch), sizes.max_tokens))
    ours, other = (statistics.median(seconds[name]) for name in ("ours", "transformers"))
    tokens = batch * sizes.max_tokens
    work = f"{batch} x {sizes.prompt_len} prompt tokens and {sizes.max_tokens} generated, against transformers generate"
    return {
        "seconds": seconds,
        "tokens_per_second": {"ours": tokens / ours, "transformers": tokens / other},
        "rows": [make_row(f"generate_{batch}", work, other / ours, 5.0, "x")],
    }


def _generate_in_transformers(setting: Setting, model: Any, prompts: list[list[int]], max_tokens: int) -> float:
    began = time.perf_counter()
    ids = torch.tensor(prompts, device=setting.device)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    assert len(out.tolist()[0]) == ids.shape[1] + max_tokens
    return time.perf_counter() - began


def _compare_logits(setting: Setting, name: str, shape: ModelShape) -> dict[str, Any]:
    """Logits of the first decode step after ragged prompts, bfloat16: as near to float32 as transformers in bfloat16
    is."""
    sizes = setting.sizes
    folder = write_config(setting.folder / name, shape)
    generator = torch.Generator().manual_seed(setting.seed)
    lengths = [1 + (sizes.prompt_len * part) // 8 for part in range(1, 8)]
    prompts = [torch.randint(shape.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    llm = _make_engine(setting, folder)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=-1, detokenize=False)
    ours = torch.empty(len(prompts), shape.vocab_size, dtype=torch.float64)
    for row, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        (completion,) = output.outputs
        prompts[row].append(completion.token_ids[0])
        readings = completion.logprobs
        assert readings is not None
        last = slice(readings.start_indices[1], readings.end_indices[1])
        ours[row, torch.from_numpy(readings.token_ids[last]).long()] = torch.from_numpy(readings.logits[last]).double()
    del llm
    truth, theirs = (
        _logits_in_transformers(setting, folder, prompts, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    our_error, their_error = ((logits - truth).abs().max().item() for logits in (ours, theirs))
    assert our_error <= 1.5 * their_error + 1e-3, f"off by {our_error}, transformers by {their_error}"
    return {"error": our_error, "error_of_transformers": their_error}


def _logits_in_transformers(
    setting: Setting, folder: Path, prompts: list[list[int]], dtype: torch.dtype
) -> torch.Tensor:
    """float64 [prompts, V], each prompt by itself."""
    model = load_in_transformers(folder, setting.device, setting.seed, dtype)
    with torch.inference_mode():
        rows = [
            model(torch.tensor([prompt], device=setting.device), logits_to_keep=1).logits[0, -1].double().cpu()
            for prompt in prompts
        ]
    del model
    gc.collect()
    synchronize(setting.device)
    return torch.stack(rows)
