"""Engines in actors of Ray Data, for `vllm score --backend ray` and `score_dataset`."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.scoring.batches import BatchScorer
from vllm.scoring.templates import Template
from vllm.utils.ray_utils import cpus_for_each

if TYPE_CHECKING:
    import pyarrow as pa
    import ray.data

# Ray restarts actors without limit; a block that ends its actor more often than this ends the job.
_MAX_DEATHS_PER_BLOCK = 3


@dataclass(frozen=True)
class Job(ABC):
    """What the engines get, and how they score a block."""

    input_name: str  # for messages
    labels: list[str] | list[int]
    template: Template | None  # None = the default one
    engine_args: EngineArgs
    replicas: int  # engines, each in an actor of its own
    cpus: float | None  # of each; None = as many as fit

    @abstractmethod
    def score(self, scorer: BatchScorer, block: pa.Table) -> pa.Table:
        """A block's results."""

    @abstractmethod
    def refused(self, reason: str) -> pa.Table:
        """A result that says why the model or the labels cannot be used; or an exception."""

    def through_engines(self, blocks: ray.data.Dataset, spare: int) -> ray.data.Dataset:
        """The results of all blocks, in any order. Each block goes to an actor whole, and to another if that dies. The
        engines leave `spare` CPUs of every node unused unless `cpus` is set. A ValueError if they do not fit."""
        import ray.data

        has_gpus = ray.cluster_resources().get("GPU", 0) > 0 and self.engine_args.device != "cpu"
        with warnings.catch_warnings():
            # Ray has no other way to limit the retries.
            warnings.filterwarnings("ignore", message=".*ray_remote_args_fn", category=DeprecationWarning)
            return blocks.map_batches(
                _Replica,
                fn_constructor_args=(self,),
                batch_size=None,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=self.replicas),
                num_cpus=cpus_for_each(self.replicas, spare) if self.cpus is None else self.cpus,
                num_gpus=self.engine_args.tensor_parallel_size if has_gpus else 0,
                ray_remote_args_fn=lambda: {"max_task_retries": _MAX_DEATHS_PER_BLOCK},
            )


class _Replica:
    """An actor with an engine."""

    def __init__(self, job: Job) -> None:
        from vllm.entrypoints.llm import LLM

        self._job = job
        self._refusal: pa.Table | None = None
        try:
            llm = LLM(**vars(job.engine_args), use_tqdm_on_load=False)
            self._scorer = BatchScorer(llm, job.template, job.labels, job.input_name)
        except (CliError, ValueError, OSError) as error:
            self._refusal = job.refused(str(error))

    def __call__(self, block: pa.Table) -> pa.Table:
        return self._job.score(self._scorer, block) if self._refusal is None else self._refusal
