"""Operations write into memory filled with NaN and huge numbers; what Triton compiles is marked as needing a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a device, Triton's backends are compiled for it: such tests are among those that need one."""
    if torch.cuda.is_available():
        for item in items:
            if (
                isinstance(item, pytest.Function)
                and hasattr(item, "callspec")
                and item.callspec.params.get("backend") == "triton"
            ):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN, or the greatest integer: a cell that a kernel forgets shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
