"""Upstream's helpers around the hub."""

from __future__ import annotations

import pytest

from vllm.transformers_utils import repo_utils


def test_calls_are_made_again(monkeypatch):
    waits, calls = [], []
    monkeypatch.setattr(repo_utils.time, "sleep", waits.append)

    def third_time_lucky() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("no line")
        return "here"

    assert repo_utils.with_retry(third_time_lucky, "asking", max_retries=3, retry_delay=1) == "here"
    assert waits == [1, 2]


def test_the_last_error_is_the_callers(monkeypatch):
    monkeypatch.setattr(repo_utils.time, "sleep", lambda seconds: None)
    with pytest.raises(OSError, match="gone"):
        repo_utils.with_retry(lambda: (_ for _ in ()).throw(OSError("gone")), "asking")


def test_a_client_of_the_hub():
    huggingface_hub = pytest.importorskip("huggingface_hub")
    assert isinstance(repo_utils.hf_api(), huggingface_hub.HfApi)
