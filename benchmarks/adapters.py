"""One interface to all engines, and the environment variables that they need.

Engines are imported late: each has its own environment, and its import counts as start-up.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from structured_forms import SCHEMA
from workloads import LABEL_IDS, STARTUP_PROMPT, EngineOptions, Workload

_HERE = Path(__file__).resolve().parent


class Adapter(Protocol):
    """One loaded engine."""

    version: str
    notes: dict[str, str]
    last: dict[str, Any]
    """Further facts of the last run."""

    def run(self, work: Workload) -> np.ndarray | None:
        """Do the work: float32 readings [prompts, positions, read_ids]; None if none were requested."""

    def score_text(self) -> list[float]:
        """Logprobs of LABEL_IDS after the text STARTUP_PROMPT."""


def prepare_process(options: EngineOptions) -> None:
    """Pin this process and set the environment variables that the engine's imports read, unless they are set."""
    os.sched_setaffinity(0, options.cores)
    os.environ.update(options.environment)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(options.cores)))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.kind == "ours":
        sys.path.insert(0, options.checkout or str(_HERE.parent))
    elif options.kind == "upstream":
        # It starts `python -m vllm...`, which in this checkout's root would be this package.
        os.chdir(tempfile.gettempdir())
        # Its default leaves one core unused.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, options.cores)))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        # Its own limit is ten minutes, too little on a busy machine.
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", "3600")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def make_adapter(options: EngineOptions) -> Adapter:
    """Load an engine; SystemExit if the environment has another one, or a peer has no model."""
    if options.kind != "ours" and options.model is None:
        raise SystemExit(f"{options.kind} needs --model")
    adapter: Callable[[EngineOptions], Adapter] = VllmAdapter
    if options.kind == "transformers":
        from transformers_adapter import TransformersAdapter as adapter
    elif options.kind == "llama.cpp":
        from llama_cpp_adapter import LlamaCppAdapter as adapter
    # Libraries try to import a module `kernels`, which must not be the script here.
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != _HERE]
    return adapter(options)


class VllmAdapter:
    """`from vllm import LLM, SamplingParams`: ours, or upstream's."""

    def __init__(self, options: EngineOptions) -> None:
        try:
            import vllm
            import vllm.logprobs
        except ImportError as error:
            raise SystemExit(f"{options.kind}: {sys.executable} cannot import vllm: {error}") from error
        self._ours = hasattr(vllm.logprobs, "PositionLogprobs")
        if self._ours != (options.kind == "ours"):
            raise SystemExit(f"{options.kind}: {sys.executable} imports the other vllm, {vllm.__file__}")
        self.version = vllm.__version__
        self.last = {}
        self.notes = {} if self._ours else {"fullvocab": "flat_logprobs, its array form"}
        self._params = vllm.SamplingParams
        chosen = {"model": options.model, "quantization": options.quantization, "model_impl": options.model_impl}
        given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        if options.speculative is not None:
            given["speculative_config"] = options.speculative
        if options.enforce_eager:
            given["enforce_eager"] = True
        if self._ours:
            given["max_logprob_token_ids"] = -1
        make = vllm.LLM
        began = time.perf_counter()
        self.llm = make(**given, dtype=options.dtype, max_logprobs=-1)
        self.load_seconds = time.perf_counter() - began

    def run(self, work: Workload) -> np.ndarray | None:
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
        if work.teacher is not None:
            return self._teach(work, prompts)
        params = self.sampling_params(work)
        if work.one_by_one:
            outputs = [self.llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        else:
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {work.max_tokens}:
            raise RuntimeError(f"asked for {work.max_tokens} tokens a prompt, got {sorted(lengths)}")
        self.last = self._drafts(outputs)
        if work.reads_prompt:
            return np.array([[[self._mean_of_prompt(output)]] for output in outputs], np.float32)
        if not work.read_ids:
            return None
        return np.array([self._read(output.outputs[0].logprobs, work.read_ids) for output in outputs], np.float32)

    def prepare(self, work: Workload) -> None:
        """Compute, untimed, prompts that are to be cached, and for teaching each position's likeliest ids."""
        if work.is_computed:
            self.run(replace(work, max_tokens=1))
        num_ids = 0 if work.teacher is None else -work.teacher[0]
        self._student: list[np.ndarray] = []
        if num_ids > 0 and self._ours:
            prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
            params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=num_ids, logprob_ranks=False)
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            self._student = [output.prompt_tables.token_ids for output in outputs]
            self.llm.reset_prefix_cache()

    def _teach(self, work: Workload, prompts: list[Any]) -> np.ndarray | None:
        """The mean logprob of what was read of each prompt, as arrays."""
        assert work.teacher is not None
        num_ids, num_topk, ranks = work.teacher
        common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
        if num_ids == 0 and num_topk is None:
            self.llm.generate(prompts, self._params(**common), use_tqdm=False)
            return None
        if not self._ours:
            # It reads the most likely ids only.
            wanted = self._params(**common, prompt_logprobs=abs(num_ids) or num_topk)
            outputs = self.llm.generate(prompts, wanted, use_tqdm=False)
            return np.array([[[self._mean_of_prompt(output)]] for output in outputs], np.float32)
        tables = self._student or [work.ids_a_position(prompt, num_ids) for prompt in work.prompts]
        fields = [{"prompt_logprobs": num_topk} if num_ids == 0 else {"prompt_logprob_token_ids": t} for t in tables]
        params = [self._params(**common, **each, logprob_ranks=ranks) for each in fields]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        read = [output.prompt_token_id_logprobs if num_ids else output.prompt_logprobs.logprobs for output in outputs]
        return np.array([[[each.mean()]] for each in read], np.float32)

    def score_text(self) -> list[float]:
        params = self._params(temperature=0.0, max_tokens=1, logprob_token_ids=list(LABEL_IDS))
        (output,) = self.llm.generate([STARTUP_PROMPT], params, use_tqdm=False)
        # Upstream drops such readings where it speculates.
        logprobs = output.outputs[0].logprobs
        return [logprobs[0][i].logprob if logprobs else float("nan") for i in LABEL_IDS]

    def sampling_params(self, work: Workload) -> Any:
        """The work's parameters."""
        wanted: dict[str, Any] = {}
        if work.full_vocabulary:
            wanted["logprobs"] = -1
            if not self._ours:
                wanted["flat_logprobs"] = True  # upstream's faster form: arrays
        elif work.reads_prompt:
            wanted["prompt_logprobs"] = 0
        elif work.read_ids:
            wanted["logprob_token_ids"] = list(work.read_ids)
        if work.has_form:
            from vllm.sampling_params import StructuredOutputsParams

            wanted["structured_outputs"] = StructuredOutputsParams(json=SCHEMA)
        if work.temperature:
            wanted["seed"] = 0
        return self._params(temperature=work.temperature, max_tokens=work.max_tokens, ignore_eos=True, **wanted)

    def _drafts(self, outputs: list[Any]) -> dict[str, Any]:
        """The drafted and the right tokens, if the engine says so by request, and a hash of the answers."""
        found: list[Any] = [each for output in outputs if (each := output.outputs[0].spec_decode_metrics) is not None]
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return {
            "drafted": sum(each.num_draft_tokens for each in found),
            "accepted": sum(sum(each.per_step_accepted) for each in found),
            "answers": hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16],
        }

    def _mean_of_prompt(self, output: Any) -> float:
        if self._ours:
            return float(output.prompt_logprobs.logprobs.mean())
        pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        return float(np.mean([position[token].logprob for position, token in pairs]))

    def _read(self, logprobs: Any, ids: tuple[int, ...]) -> Any:
        if self._ours:
            return logprobs.select(ids).logprobs
        return [[position[i].logprob for i in ids] for position in logprobs]
