"""Names of `vllm.utils` that nothing here uses."""

from __future__ import annotations

import uuid

from vllm.upstream.utils.argparse_utils import FlexibleArgumentParser
from vllm.upstream.utils.async_utils import make_async, merge_async_iterators
from vllm.upstream.utils.collection_utils import as_list, chunk_list, flatten_2d_lists, full_groupby, is_list_of
from vllm.upstream.utils.counter import AtomicCounter, Counter
from vllm.upstream.utils.func_utils import supports_kw
from vllm.upstream.utils.import_utils import import_from_path, resolve_obj_by_qualname
from vllm.upstream.utils.math_utils import cdiv, next_power_of_2, round_down, round_up
from vllm.upstream.utils.mem_constants import GiB_bytes, MiB_bytes
from vllm.upstream.utils.network_utils import get_distributed_init_method, get_ip, get_open_port, get_tcp_uri
from vllm.upstream.utils.platform_utils import is_pin_memory_available
from vllm.upstream.utils.system_utils import update_environment_variables

MASK_64_BITS = (1 << 64) - 1


def random_uuid() -> str:
    """A new name of 32 hexadecimal digits."""
    return uuid.uuid4().hex


__all__ = [
    "AtomicCounter",
    "Counter",
    "FlexibleArgumentParser",
    "GiB_bytes",
    "MASK_64_BITS",
    "MiB_bytes",
    "as_list",
    "cdiv",
    "chunk_list",
    "flatten_2d_lists",
    "full_groupby",
    "get_distributed_init_method",
    "get_ip",
    "get_open_port",
    "get_tcp_uri",
    "import_from_path",
    "is_list_of",
    "is_pin_memory_available",
    "make_async",
    "merge_async_iterators",
    "next_power_of_2",
    "random_uuid",
    "resolve_obj_by_qualname",
    "round_down",
    "round_up",
    "supports_kw",
    "update_environment_variables",
]
