"""An engine in an actor of a Ray cluster: its resources, and what it scores with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.utils.ray_utils import cpus_for_each, import_ray

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM


def engine_resources(engine_args: EngineArgs, replicas: int, cpus: float | None, spare: int = 0) -> dict[str, Any]:
    """Ray's options of an actor with one of `replicas` engines.

    Args:
        cpus: of an engine; None: as many as fit, with `spare` CPUs of every node unused.

    Raises:
        ValueError: the cluster has no room for so many.
    """
    has_gpus = import_ray().cluster_resources().get("GPU", 0) > 0 and engine_args.device != "cpu"
    return {
        "num_cpus": _cpus_for_each(engine_args, replicas, spare) if cpus is None else cpus,
        "num_gpus": engine_args.tensor_parallel_size if has_gpus else 0,
    }


def _cpus_for_each(engine_args: EngineArgs, replicas: int, spare: int) -> int:
    count, together = rank_groups(engine_args)
    return cpus_for_each(replicas * count * together, spare, together)


def rank_groups(engine_args: EngineArgs) -> tuple[int, int]:
    """How many nodes an engine may be spread over, and the actors of these resources on each: one, or on CPUs one for
    each rank that Ray is to place, where those of a stage are on one node."""
    width, num_stages = engine_args.tensor_parallel_size, engine_args.pipeline_parallel_size
    is_placed = engine_args.distributed_executor_backend == "ray" and engine_args.device != "cuda"
    if not is_placed or import_ray().cluster_resources().get("GPU", 0):
        return 1, 1
    return (num_stages, width) if num_stages > 1 else (width, 1)


def load_scorer(engine_args: EngineArgs, make_scorer: Callable[[LLM], Any]) -> tuple[Any, str | None]:
    """The scorer that `make_scorer` makes of a new engine, or why the arguments cannot be used."""
    from vllm.entrypoints.llm import LLM

    try:
        return make_scorer(LLM(**{**vars(engine_args), "use_tqdm_on_load": False})), None
    except (CliError, ValueError, OSError) as error:
        # As an exception it would come with a traceback through Ray.
        return None, str(error)
