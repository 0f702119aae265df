"""The configuration of the engine that is being built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vllm.config.vllm import VllmConfig

_current: ContextVar[VllmConfig | None] = ContextVar("vllm_config", default=None)


@contextmanager
def set_current_vllm_config(
    vllm_config: VllmConfig, check_compile: bool = False, prefix: str | None = None
) -> Iterator[None]:
    """Make `vllm_config` the one that `get_current_vllm_config` gives within.

    Args:
        check_compile, prefix: for compiled models; without effect, as nothing is compiled.
    """
    token = _current.set(vllm_config)
    try:
        yield
    finally:
        _current.reset(token)


def get_current_vllm_config() -> VllmConfig:
    """
    Raises:
        AssertionError: none is set.
    """
    config = _current.get()
    assert config is not None, "no configuration is set: call this within set_current_vllm_config(...)"
    return config


def get_current_vllm_config_or_none() -> VllmConfig | None:
    """The one that is set, if any."""
    return _current.get()
