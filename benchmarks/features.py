"""Cost of each feature of the sampler, for requests with and without it.

    python benchmarks/features.py                        # the embedded model
    python benchmarks/features.py --features penalties,bad_words

64 sequences decode; a JSON line a feature gives the median time of the sampler in a step (microseconds) when none, one
and all of them use the feature. "none" is measured in turns with the others for each feature, so that drift of the
machine does not show as a cost. `loaded_processor` is a custom logits processor that the engine has loaded, with "one"
and "all" of the requests changed by it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from common import add_counts, make_parser, some_of

NUM_SEQUENCES = 64
_IDS = list(range(1000, 1020))


def _penalise(output_ids: list[int], logits: Any) -> Any:
    logits[_IDS] -= 1.0
    return logits


# Feature -> fields of the requests that use it.
FEATURES: dict[str, dict[str, Any]] = {
    "logprob_token_ids": {"logprob_token_ids": _IDS},
    "logprobs": {"logprobs": 5},
    "entropy": {"logprobs": 0, "logprob_entropy": True},
    "processed_logprobs": {"logprobs": 5, "logprobs_mode": "processed_logprobs"},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "logit_bias": {"logit_bias": dict.fromkeys(_IDS, 1.0)},
    "allowed_token_ids": {"allowed_token_ids": range(1000, 4000)},
    "min_tokens": {"min_tokens": 1000},
    "bad_words": {"bad_words": ["never", "nothing at all", "no way"]},
    "sampling": {"temperature": 1.0, "seed": 1},
    "min_p": {"temperature": 1.0, "seed": 1, "min_p": 0.05},
    "top_k": {"temperature": 1.0, "seed": 1, "top_k": 40},
    "top_p": {"temperature": 1.0, "seed": 1, "top_p": 0.9},
    "logits_processors": {"logits_processors": [_penalise]},
    "loaded_processor": {"extra_args": {"target_token": 1000}},
}


class _Timed:
    """A sampler that records the time of each call."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.microseconds: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = self._sampler(*arguments)
        self.microseconds.append((time.perf_counter() - began) * 1e6)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _Engine:
    def __init__(self, model: str | None, dtype: str, processors: list[Any] | None) -> None:
        from vllm import LLM

        self.llm = LLM(model, dtype=dtype, max_model_len=512, logits_processors=processors)

        def wrap(worker: Any) -> _Timed:
            worker.model_runner.sampler = _Timed(worker.model_runner.sampler)
            return worker.model_runner.sampler

        (self.sampler,) = self.llm.collective_rpc(wrap)

    def step_times(self, fields: dict[str, Any], num_users: int, num_steps: int) -> list[float]:
        """Microseconds of the sampler in each decode step."""
        from vllm import SamplingParams

        plain: dict[str, Any] = {"temperature": 0.0, "max_tokens": num_steps, "ignore_eos": True}
        users = {**plain, **fields}
        users["min_tokens"] = min(users.get("min_tokens", 0), num_steps)
        params = [SamplingParams(**plain)] * (NUM_SEQUENCES - num_users)
        # In the middle, so that the rows without the feature are not contiguous.
        middle = len(params) // 2
        params[middle:middle] = [SamplingParams(**users)] * num_users
        prompts = [[100 + index, 7, 8, 9] for index in range(NUM_SEQUENCES)]
        self.sampler.microseconds.clear()
        self.llm.generate(prompts, params, use_tqdm=False)
        return self.sampler.microseconds[2:]


def measure(engine: Callable[[bool], _Engine], feature: str, num_steps: int, repeats: int) -> dict[str, Any]:
    """One feature's line."""
    with_processor = feature == "loaded_processor"
    users = {"none": 0, "one": 1, "all": NUM_SEQUENCES}
    times: dict[str, list[float]] = {name: [] for name in users}
    for _ in range(repeats):
        for name, count in users.items():
            times[name] += engine(with_processor).step_times(FEATURES[feature], count, num_steps)
    medians = {name: round(statistics.median(values)) for name, values in times.items()}
    if with_processor:
        plain = [value for _ in range(repeats) for value in engine(False).step_times({}, 0, num_steps)]
        medians["not_loaded"] = round(statistics.median(plain))
    return {"feature": feature, "unit": "us", "sequences": NUM_SEQUENCES, **medians}


def _make_processor() -> type:
    import torch

    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Target(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            target = (params.extra_args or {}).get("target_token")
            if target is None:
                return None

            def keep(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
                value = logits[target].clone()
                logits.fill_(-torch.inf)
                logits[target] = value
                return logits

            return keep

    return Target


def main() -> None:
    """Measure the features that were asked for."""
    parser = make_parser("What each feature of the sampler costs.", dtype=True)
    names = f"some of {','.join(FEATURES)}"
    parser.add_argument("--features", type=some_of(FEATURES, "feature"), default=list(FEATURES), help=names)
    add_counts(parser, steps=(12, "decode steps a run"), repeats=(2, "runs of each"))
    args = parser.parse_args()

    @cache
    def engine(with_processor: bool) -> _Engine:
        made = _Engine(args.model, args.dtype, [_make_processor()] if with_processor else None)
        made.step_times({}, 0, args.steps)  # warm-up
        return made

    for feature in args.features:
        print(json.dumps(measure(engine, feature, args.steps, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
