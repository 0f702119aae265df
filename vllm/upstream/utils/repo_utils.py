"""Access to the hub, for callers of upstream's helpers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from vllm.logger import init_logger

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = init_logger(__name__)

_T = TypeVar("_T")


def hf_api() -> HfApi:
    """A client of the hub, at the address that the environment names."""
    from huggingface_hub import HfApi

    return HfApi()


def with_retry(func: Callable[[], _T], log_msg: str, max_retries: int = 2, retry_delay: int = 2) -> _T:
    """The function's result, of the first of up to `max_retries` calls that raises nothing.

    Args:
        log_msg: what the log says of a call that failed.
        retry_delay: seconds until the second call; each further wait is twice the one before.

    Raises:
        Exception: that of the last call.
    """
    for attempt in range(1, max_retries):
        try:
            return func()
        except Exception as error:
            logger.warning("%s: %s (attempt %d of %d)", log_msg, error, attempt, max_retries)
            time.sleep(retry_delay)
            retry_delay *= 2
    return func()
