"""Ranks, replicas and how they are started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.config.checks import at_least, one_of

if TYPE_CHECKING:
    from vllm.config.checkpoint.config import HFConfig

EXECUTOR_BACKENDS = ("uni", "mp", "ray", "external_launcher")


# Not frozen, as other configurations are: trainers set the port of a finished one.
@dataclass
class ParallelConfig:
    """How many devices, and who drives them.

    Attributes:
        tensor_parallel_size: N, ranks that each layer is split over.
        pipeline_parallel_size: P, stages that a replica's layers are shared out to; each has N ranks.
        distributed_executor_backend: "uni": a worker in the engine's process; "mp": a process for each further rank;
            "ray": a Ray actor for each, on any machine of a cluster; "external_launcher": torchrun started a process
            for each, and each of them makes an engine; None: "uni" or "mp", whichever fits.
        disable_custom_all_reduce: ranks of one machine are connected by gloo (CPU) or NCCL alone, not by shared memory.
        data_parallel_size: replicas behind one server, each an engine core with a KV cache of its own.
        data_parallel_rank: which of them this configuration is for, in [0, data_parallel_size).
        worker_extension_cls: a class, or its path, whose methods workers get.
        data_parallel_master_port: changes nothing; the replicas' processes meet over files.
        placement_group: of Ray, whose bundles the ranks of "ray" take; None: the one that the caller runs in, if it has
            a bundle for each rank, or else a new one.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    disable_custom_all_reduce: bool = False
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    worker_extension_cls: str | type = ""
    data_parallel_master_port: int = field(default=0, repr=False, compare=False)
    placement_group: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        at_least("data_parallel_size", self.data_parallel_size, 1)
        at_least("data_parallel_rank", self.data_parallel_rank, 0)
        backend, size = self.distributed_executor_backend, self.world_size
        if backend is not None:
            one_of("distributed_executor_backend", backend, EXECUTOR_BACKENDS)
        if backend == "uni" and size > 1:
            name = "tensor" if self.pipeline_parallel_size == 1 else "pipeline"
            value = getattr(self, f"{name}_parallel_size")
            raise ValueError(
                f"distributed_executor_backend='uni' drives one device, but {name}_parallel_size is {value}"
            )

    def check_devices(self, found: int) -> None:
        """
        Raises:
            ValueError: there are fewer CUDA devices than the replicas need.
        """
        needed = self.data_parallel_size * self.tensor_parallel_size
        if needed > found:
            raise ValueError(
                f"data_parallel_size={self.data_parallel_size} with tensor_parallel_size={self.tensor_parallel_size} "
                f"needs {needed} CUDA devices, and there are {found}"
            )

    def check_divides(self, hf: HFConfig) -> None:
        """
        Raises:
            ValueError: a dimension of the model cannot be split over the ranks; names it, its size and their number.
        """
        size = self.tensor_parallel_size
        for name, value in (
            ("num_attention_heads", hf.num_attention_heads),
            ("num_key_value_heads", hf.num_key_value_heads),
            ("intermediate_size", hf.intermediate_size),
        ):
            # A rank may share its key and value heads with others.
            if value % size and not (name == "num_key_value_heads" and not size % value):
                rule = "one must be a multiple of the other" if name == "num_key_value_heads" else "it must divide them"
                raise ValueError(f"tensor_parallel_size={size} does not fit the model's {name}={value}: {rule}")
        if hf.vocab_size < size:
            raise ValueError(f"tensor_parallel_size={size} exceeds the model's vocab_size={hf.vocab_size}")

    @property
    def world_size(self) -> int:
        """Ranks of a replica: those of all its stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def first_device(self) -> int:
        """Number of the replica's first device: replica r of T devices each has r * T .. r * T + T - 1."""
        return self.data_parallel_rank * self.tensor_parallel_size
