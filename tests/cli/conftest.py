"""The commands over files share this."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.scoring import run as score_run


@pytest.fixture
def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors in the arguments or the data are to be said before a model loads."""

    def refuse(args: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(score_run, "load", refuse)
