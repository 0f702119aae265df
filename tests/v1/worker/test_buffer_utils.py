from __future__ import annotations

import numpy as np
import torch

from vllm.v1.worker.gpu.buffer_utils import StagedTensor


def test_rows_are_visible_after_apply(device: str) -> None:
    table = StagedTensor((5, 3), torch.int32, device, fill=-1)
    table.stage(1, np.array([1, 2, 3]))
    table.stage(4, 9)
    table.stage(1, np.array([4, 5, 6]))
    table.apply_staged_writes()
    expected = np.full((5, 3), -1)
    expected[1], expected[4] = [4, 5, 6], 9
    np.testing.assert_array_equal(table.tensor.cpu().numpy(), expected)
    np.testing.assert_array_equal(table.np, expected)


def test_one_dimension_and_dtypes(device: str) -> None:
    for dtype, value in (
        (torch.float32, 0.25),
        (torch.int64, -(2**63)),
        (torch.int32, 7),
        (torch.bool, True),
    ):
        table = StagedTensor(4, dtype, device)
        table.stage(2, value)
        table.apply_staged_writes()
        assert table.tensor.dtype == dtype
        assert table.tensor.tolist() == [0, 0, value, 0]


def test_growth_keeps_contents_and_pending_rows(device: str) -> None:
    table = StagedTensor((3, 2), torch.int32, device, fill=-1)
    table.stage(0, np.array([1, 2]))
    table.apply_staged_writes()
    table.stage(2, np.array([3, 4]))
    table.ensure_width(3)
    assert table.np.shape == (3, 4), "growth at least doubles, or a slow ramp would copy the table at every request"
    table.apply_staged_writes()
    expected = [[1, 2, -1, -1], [-1] * 4, [3, 4, -1, -1]]
    assert table.tensor.tolist() == expected
    table.ensure_width(4)
    assert table.tensor.tolist() == expected
    table.stage(1, 5)
    table.apply_staged_writes()
    assert table.tensor.tolist() == [expected[0], [5] * 4, expected[2]]


def test_cpu_tables_share_memory() -> None:
    table = StagedTensor((3, 2), torch.float32, "cpu")
    table.stage(1, 2.5)
    assert table.tensor.tolist()[1] == [2.5, 2.5]
    assert np.shares_memory(table.np, table.tensor.numpy())


def test_a_table_off_the_host_changes_only_when_applied() -> None:
    """The path of CUDA, on a CPU: the table believes that its tensor lives elsewhere."""

    class Elsewhere(StagedTensor):
        _shared = False

    table = Elsewhere((3, 2), torch.int32, "cpu")
    table.tensor = table.tensor.clone()
    table.stage(1, np.array([1, 2]))
    assert table.tensor.tolist() == [[0, 0]] * 3
    table.apply_staged_writes()
    assert table.tensor.tolist() == [[0, 0], [1, 2], [0, 0]]
    table.tensor[1] = 7
    table.apply_staged_writes()
    assert table.tensor.tolist() == [[0, 0], [7, 7], [0, 0]], "a row is uploaded once, when it was staged"
