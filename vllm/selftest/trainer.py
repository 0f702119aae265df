"""Whether the engine's logprobs of sampled tokens are those that a trainer computes over the same weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.selftest.probes import Probe, run_probes

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

LIMIT = 1e-3
"""How far a ratio may be from 1 where engine and trainer compute in float32."""

_PROMPT_LENGTHS = (8, 40, 200, 900)
_CONTEXT_BOUNDS = (64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Sampled:
    """One sequence: the prompt's token ids, those sampled after it, and the engine's logprob of each of these, float64
    [sampled tokens]."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: np.ndarray


@dataclass(frozen=True)
class Deviation:
    """Importance ratios exp(trainer's logprob - engine's) of sampled tokens with at most `context` tokens before them
    and more than the last row's (None: of all): how many, and how far from 1: mean, 99th percentile, worst."""

    context: int | None
    tokens: int
    mean: float
    p99: float
    worst: float


def make_prompts(engine: LLMEngine, per_length: int, max_tokens: int, seed: int) -> list[list[int]]:
    """`per_length` (>= 1) prompts of random ids of each length that leaves room for max_tokens (>= 1)."""
    config, draw = engine.model_config, random.Random(seed)
    room = config.max_model_len - max_tokens
    lengths = sorted({max(1, min(length, room)) for length in _PROMPT_LENGTHS})
    vocabulary = range(config.vocab_size)
    return [draw.choices(vocabulary, k=length) for length in lengths for _ in range(per_length)]


def sample(
    engine: LLMEngine, prompts: Sequence[list[int]], max_tokens: int, temperature: float, seed: int
) -> list[Sampled]:
    """Sample max_tokens after each prompt in an idle engine, all together. Logprobs are at that temperature (> 0). A
    RuntimeError if the model failed on a prompt."""
    probes = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed + index, logprobs=0, ignore_eos=True,
            logprobs_mode="processed_logprobs", detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        probes.append(Probe(prompt, "sampled", params))
    sampled = []
    for probe, output in zip(probes, run_probes(engine, probes), strict=True):
        (completion,) = output.outputs
        rows = completion.logprobs
        assert rows is not None, "they were asked for"
        token_ids = list(completion.token_ids)
        values = [row[token_id].logprob for token_id, row in zip(token_ids, rows, strict=True)]
        sampled.append(Sampled(probe.prompt, token_ids, np.array(values, dtype=np.float64)))
    return sampled


class Trainer:
    """transformers' model as a trainer runs it: whole sequences at once, no cache of keys and values.

    Args:
        path: the model's folder.
        kind: a dtype by name, or "autocast": weights in float32, products in bfloat16, by torch.autocast.
        attn_implementation: as transformers takes it; None: its own choice.

    Raises:
        ValueError, OSError: transformers cannot load the model.
    """

    def __init__(
        self, path: str, kind: str, trust_remote_code: bool = False, attn_implementation: str | None = None
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
        self._is_autocast = kind == "autocast"
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options).eval()

    def logprobs(self, sampled: Sequence[Sampled], temperature: float) -> list[np.ndarray]:
        """The logprobs of the sampled tokens of each sequence at that temperature, float64 [sampled tokens]. The
        model's logits, in its dtype, are widened before softmax."""
        import torch

        found = []
        with torch.inference_mode(), self._autocast():
            for each in sampled:
                ids = torch.tensor([each.prompt + each.token_ids])
                count = len(each.token_ids)
                logits = self.model(input_ids=ids, use_cache=False).logits[0, -count - 1 : -1]
                logprobs = (logits.double() / temperature).log_softmax(-1)
                picked = logprobs.gather(1, torch.tensor(each.token_ids)[:, None])
                found.append(picked[:, 0].numpy())
        return found

    def _autocast(self) -> AbstractContextManager[Any]:
        import torch

        return torch.autocast("cpu", torch.bfloat16) if self._is_autocast else nullcontext()


def compare(sampled: Sequence[Sampled], trainer: Sequence[np.ndarray]) -> list[Deviation]:
    """The deviation of all tokens (the first) and of those of each range of contexts. A ratio that is no number is
    infinitely far."""
    contexts = np.concatenate([len(each.prompt) + np.arange(len(each.token_ids)) for each in sampled])
    with np.errstate(invalid="ignore", over="ignore"):
        logs = np.concatenate([own - each.logprobs for each, own in zip(sampled, trainer, strict=True)])
        distances = np.abs(np.expm1(logs))
    distances[np.isnan(distances)] = np.inf
    rows = [_deviation(None, distances)]
    above = 0
    for bound in _CONTEXT_BOUNDS:
        chosen = distances[(contexts > above) & (contexts <= bound)]
        if len(chosen):
            rows.append(_deviation(bound, chosen))
        above = bound
    return rows


def _deviation(context: int | None, distances: np.ndarray) -> Deviation:
    p99 = np.quantile(distances, 0.99, method="higher")
    return Deviation(context, len(distances), float(distances.mean()), float(p99), float(distances.max()))
