"""The engines that can do the work: this package, the upstream one of the same interface, transformers.

An adapter's `run` does a Workload and returns float32 readings [prompts, positions, read_ids] (None where
nothing was asked for). Engines are imported late: each lives in an environment of its own, and its import
belongs to the start-up row.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from workloads import LABEL_IDS, STARTUP_PROMPT, Workload

ENGINES = ("ours", "vllm", "transformers")


class Adapter(Protocol):
    """One loaded engine."""

    version: str
    notes: dict[str, str]

    def run(self, work: Workload) -> np.ndarray | None:
        """Do the work; the readings, or None."""

    def score_text(self) -> list[float]:
        """Logprobs of LABEL_IDS after STARTUP_PROMPT, given as text."""


def prepare_process(engine: str, threads: int) -> None:
    """Set what must be set before the engine's libraries are imported; what the caller has set stays."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if engine == "ours":
        # The checkout that this file belongs to, installed or not.
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    elif engine == "vllm":
        # It starts `python -m vllm...`, which from this checkout's root would be this package.
        os.chdir(tempfile.gettempdir())
        # Its default leaves one core to a process that only waits.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def make_adapter(engine: str, model: str | None, dtype: str, quantization: str | None = None) -> Adapter:
    """Load an engine.

    Raises:
        SystemExit: the environment holds another engine than the one named, or transformers got no model.
    """
    if engine == "transformers":
        if model is None:
            raise SystemExit("--engine transformers needs --model FOLDER")
        from transformers_adapter import TransformersAdapter

        return TransformersAdapter(model, dtype)
    return VllmAdapter(engine, model, dtype, quantization)


class VllmAdapter:
    """`from vllm import LLM, SamplingParams`: ours, or upstream's."""

    def __init__(self, engine: str, model: str | None, dtype: str, quantization: str | None) -> None:
        try:
            import vllm
            import vllm.logprobs
        except ImportError as error:
            raise SystemExit(f"--engine {engine}: {sys.executable} cannot import it: {error}") from error
        self._ours = hasattr(vllm.logprobs, "PositionLogprobs")
        if self._ours != (engine == "ours"):
            raise SystemExit(f"--engine {engine}: {sys.executable} imports the other vllm, {vllm.__file__}")
        if model is None and not self._ours:
            raise SystemExit("--engine vllm needs --model FOLDER")
        self.version = vllm.__version__
        self.notes: dict[str, str] = {}
        self._params = vllm.SamplingParams
        named = {} if model is None else {"model": model}
        self._llm = vllm.LLM(**named, dtype=dtype, quantization=quantization, max_logprobs=-1)

    def run(self, work: Workload) -> np.ndarray | None:
        """See Adapter."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in work.prompts], self._sampling_params(work), use_tqdm=False
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
        (output,) = self._llm.generate([STARTUP_PROMPT], params, use_tqdm=False)
        return [output.outputs[0].logprobs[0][i].logprob for i in LABEL_IDS]

    def _sampling_params(self, work: Workload) -> Any:
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
