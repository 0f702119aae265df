"""Upstream's environment variables are attributes of vllm.envs, read when they are asked for."""

from __future__ import annotations

import pytest

from vllm import envs
from vllm.upstream.env_table import environment_variables


def test_all_are_readable_with_their_defaults(monkeypatch):
    for name in environment_variables:
        monkeypatch.delenv(name, raising=False)
        getattr(envs, name)
        assert not envs.is_set(name)
    assert (envs.VLLM_HOST_IP, envs.VLLM_PORT, envs.VLLM_API_KEY) == ("", None, None)
    assert (envs.VLLM_USE_V1, envs.VLLM_SERVER_DEV_MODE, envs.VLLM_LOGGING_LEVEL) == (True, False, "INFO")
    assert envs.VLLM_CACHE_ROOT.endswith("/.cache/vllm") or "vllm" in envs.VLLM_CACHE_ROOT
    assert set(environment_variables) <= set(dir(envs))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("VLLM_PORT", "1234", 1234),
        ("VLLM_SERVER_DEV_MODE", "1", True),
        ("VLLM_USE_V1", "false", False),
        ("VLLM_LOG_STATS_INTERVAL", "2.5", 2.5),
        ("VLLM_PLUGINS", "a,b", ["a", "b"]),
        ("VLLM_LOGGING_LEVEL", "debug", "DEBUG"),
        ("VLLM_CACHE_ROOT", "/tmp/cache", "/tmp/cache"),
        ("VLLM_CPU_NUM_OF_RESERVED_CPU", "2", 2),
    ],
)
def test_a_value_set_later_counts(monkeypatch, name, text, value):
    monkeypatch.setenv(name, text)
    assert getattr(envs, name) == value
    assert environment_variables[name]() == value
    assert envs.is_set(name)


@pytest.mark.parametrize(("name", "text"), [("VLLM_PORT", "tcp://10.0.0.1:80"), ("VLLM_USE_V1", "maybe")])
def test_a_bad_value_is_named(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name} must be"):
        getattr(envs, name)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="VLLM_NOTHING"):
        _ = envs.VLLM_NOTHING
    with pytest.raises(AttributeError, match="VLLM_NOTHING"):
        envs.is_set("VLLM_NOTHING")


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e999", "x"])
def test_numbers_are_finite(monkeypatch, text):
    for name, read in (
        ("VLLM_CPU_KVCACHE_SPACE", envs.cpu_kvcache_space_bytes),
        ("VLLM_WORKER_TIMEOUT_S", envs.worker_timeout_seconds),
        ("VLLM_WORKER_LINK_TIMEOUT_S", envs.worker_link_timeout_seconds),
        ("VLLM_PP_LAYER_PARTITION", envs.layer_partition),
        ("VLLM_ENGINE_HANG_TIMEOUT_S", envs.engine_hang_timeout_seconds),
        ("VLLM_LOG_STATS_INTERVAL", lambda: envs.VLLM_LOG_STATS_INTERVAL),
        ("VLLM_PORT", lambda: envs.VLLM_PORT),
    ):
        monkeypatch.setenv(name, text)
        with pytest.raises(ValueError, match=rf"{name} must be .* got '{text}'"):
            read()


def test_a_link_is_given_time_to_repeat_a_packet(monkeypatch):
    monkeypatch.setenv("VLLM_WORKER_LINK_TIMEOUT_S", "2")
    with pytest.raises(ValueError, match="VLLM_WORKER_LINK_TIMEOUT_S must be at least 5 seconds, got 2"):
        envs.worker_link_timeout_seconds()
