"""Operations write into memory filled with NaN and huge numbers; tests that need a device stay out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests out that need a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    without = [item for item in items if "gpu" in item.keywords]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if "gpu" not in item.keywords]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN, or the greatest integer: a cell that a kernel forgets shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
