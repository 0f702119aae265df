"""Logging under the logger `vllm`, at WARNING unless VLLM_LOGGING_LEVEL is set; VLLM_CONFIGURE_LOGGING=0 leaves it
alone, VLLM_LOGGING_CONFIG_PATH sets it up by a file."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.config
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from vllm import envs

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_DEFAULT_LEVEL = "WARNING"
_seen: set[str] = set()


@lru_cache
def _configure_from(path: str) -> None:
    """
    Raises:
        ValueError: VLLM_LOGGING_CONFIG_PATH names no file that logging.config.dictConfig takes.
    """
    try:
        logging.config.dictConfig(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"VLLM_LOGGING_CONFIG_PATH={path} cannot be used: {error}") from None


def _configure_root() -> logging.Logger:
    root = logging.getLogger("vllm")
    if root.handlers or not envs.configures_logging():
        return root
    if path := envs.logging_config_path():
        _configure_from(path)
        return root
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.propagate = False
    wanted = envs.logging_level() or _DEFAULT_LEVEL
    level = getattr(logging, wanted, None)
    if isinstance(level, int):
        root.setLevel(level)
    else:
        root.setLevel(_DEFAULT_LEVEL)
        root.warning("VLLM_LOGGING_LEVEL=%s is not a level name; using %s", wanted, _DEFAULT_LEVEL)
    return root


def init_logger(name: str) -> logging.Logger:
    """The logger of a module, by its `__name__`."""
    _configure_root()
    return logging.getLogger(name)


@contextlib.contextmanager
def timed(logger: logging.Logger, work: str) -> Iterator[None]:
    """Log what was done, and how long it took."""
    start = time.monotonic()
    yield
    logger.info("%s: %.1f s", work, time.monotonic() - start)


def warn_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a formatted warning once per process."""
    _log_once(logger.warning, message % args if args else message)


def info_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a formatted line once per process."""
    _log_once(logger.info, message % args if args else message)


def _log_once(log: Callable[..., None], text: str) -> None:
    if text not in _seen:
        _seen.add(text)
        log("%s", text)
