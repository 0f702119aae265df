"""Names of `vllm.distributed` that nothing here uses."""

from vllm.distributed.parallel_state import get_tp_group
from vllm.upstream.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_dp_group,
    get_ep_group,
    get_eplb_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.upstream.distributed.utils import StatelessProcessGroup, divide, split_tensor_along_last_dim

__all__ = [
    "get_ep_group",
    "get_eplb_group",
    "StatelessProcessGroup",
    "cleanup_dist_env_and_memory",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "divide",
    "ensure_model_parallel_initialized",
    "get_dp_group",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "get_world_group",
    "init_distributed_environment",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "split_tensor_along_last_dim",
]
