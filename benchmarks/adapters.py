"""The engines that can do the work, each behind one interface; which settings its environment needs.

An adapter's `run` does a Workload and returns float32 readings [prompts, positions, read_ids] (None where
nothing was asked for). Engines are imported late: each lives in an environment of its own, and its import
belongs to the start-up row.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from workloads import LABEL_IDS, STARTUP_PROMPT, EngineOptions, Workload

_HERE = Path(__file__).resolve().parent


class Adapter(Protocol):
    """One loaded engine."""

    version: str
    notes: dict[str, str]

    def run(self, work: Workload) -> np.ndarray | None:
        """Do the work; the readings, or None."""

    def score_text(self) -> list[float]:
        """Logprobs of LABEL_IDS after STARTUP_PROMPT, given as text."""


def prepare_process(options: EngineOptions) -> None:
    """Pin this process, and set what must be set before the engine's libraries are imported; of the environment, what
    the caller has set stays."""
    os.sched_setaffinity(0, options.cores)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(options.cores)))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.kind == "ours":
        # The checkout that this file belongs to, installed or not.
        sys.path.insert(0, str(_HERE.parent))
    elif options.kind == "upstream":
        # It starts `python -m vllm...`, which from this checkout's root would be this package.
        os.chdir(tempfile.gettempdir())
        # Its default leaves one core to a process that only waits.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, options.cores)))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        # It gives its own start up otherwise where it takes ten minutes, as on a busy machine.
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", "3600")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def make_adapter(options: EngineOptions) -> Adapter:
    """Load an engine.

    Raises:
        SystemExit: the environment holds another engine than the one named, or a peer got no model.
    """
    if options.kind != "ours" and options.model is None:
        raise SystemExit(f"{options.kind} needs --model")
    adapter = _adapter_class(options.kind)
    # Libraries try to import one called `kernels`, which must not be the script here.
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != _HERE]
    return adapter(options)


def _adapter_class(kind: str) -> Callable[[EngineOptions], Adapter]:
    if kind == "transformers":
        from transformers_adapter import TransformersAdapter

        return TransformersAdapter
    if kind == "llama.cpp":
        from llama_cpp_adapter import LlamaCppAdapter

        return LlamaCppAdapter
    return VllmAdapter


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
        self.notes = {} if self._ours else {"fullvocab": "flat_logprobs, its array form"}
        self._params = vllm.SamplingParams
        chosen = {
            "model": options.model,
            "quantization": options.quantization,
            "enforce_eager": options.enforce_eager or None,
        }
        given = {name: value for name, value in chosen.items() if value is not None}
        self.llm = vllm.LLM(**given, dtype=options.dtype, max_logprobs=-1)

    def run(self, work: Workload) -> np.ndarray | None:
        """See Adapter."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in work.prompts], self.sampling_params(work), use_tqdm=False
        )
        _check_lengths([len(output.outputs[0].token_ids) for output in outputs], work)
        if work.reads_prompt:
            return np.array([[[self._mean_of_prompt(output)]] for output in outputs], np.float32)
        if not work.read_ids:
            return None
        return np.array([self._read(output.outputs[0].logprobs, work.read_ids) for output in outputs], np.float32)

    def score_text(self) -> list[float]:
        """See Adapter."""
        params = self._params(temperature=0.0, max_tokens=1, logprob_token_ids=list(LABEL_IDS))
        (output,) = self.llm.generate([STARTUP_PROMPT], params, use_tqdm=False)
        return [output.outputs[0].logprobs[0][i].logprob for i in LABEL_IDS]

    def sampling_params(self, work: Workload) -> Any:
        """What the engine is asked for."""
        wanted: dict[str, Any] = {}
        if work.full_vocabulary:
            wanted["logprobs"] = -1
            if not self._ours:
                # Arrays instead of an object an entry: upstream's faster form.
                wanted["flat_logprobs"] = True
        elif work.reads_prompt:
            wanted["prompt_logprobs"] = 0
        elif work.read_ids:
            wanted["logprob_token_ids"] = list(work.read_ids)
        return self._params(temperature=0.0, max_tokens=work.max_tokens, ignore_eos=True, **wanted)

    def _mean_of_prompt(self, output: Any) -> float:
        if self._ours:
            return float(output.prompt_logprobs.logprobs.mean())
        pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        return float(np.mean([position[token].logprob for position, token in pairs]))

    def _read(self, logprobs: Any, ids: tuple[int, ...]) -> Any:
        if self._ours:
            return logprobs.select(ids).logprobs
        return [[position[i].logprob for i in ids] for position in logprobs]


def _check_lengths(lengths: list[int], work: Workload) -> None:
    if set(lengths) != {work.max_tokens}:
        raise RuntimeError(f"asked for {work.max_tokens} tokens a prompt, got {sorted(set(lengths))}")
