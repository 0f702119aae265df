"""An audit of many rows keeps some bytes of each, and no object."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm.auditing.label_tables import LabelTable, TableBuilder, label_statistics
from vllm.auditing.pooled_rows import embedding_statistics, ranking_statistics
from vllm.auditing.text_rows import text_table

# The bootstrap and the nearest texts need as much for either.
FEW, MANY = 12_000, 36_000
Pair = tuple[dict[str, Any], dict[str, Any]]


def peak(work: Callable[[int], object], count: int) -> int:
    """The most bytes that were allocated at once."""
    tracemalloc.start()
    try:
        work(count)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def label_table(count: int) -> LabelTable:
    builder = TableBuilder(["a", "b"], ["kind"])
    readings = {"logprobs": {"a": -0.5, "b": -1.5}, "ranks": {"a": 1, "b": 2}, "label_mass": 0.8}
    for index in range(count):
        builder.add(index, readings, readings, 10, index % 2, {"kind": index % 3})
    table = builder.table()
    assert table is not None
    return table


def pairs(count: int, make: Callable[[int], dict[str, Any]]) -> Iterator[Pair]:
    return ((make(index), make(index)) for index in range(count))


def documents(count: int) -> object:
    return ranking_statistics(pairs(count, lambda i: {"query": str(i % 9), "score": i % 97 / 97}), "query")


def vectors(count: int) -> object:
    return embedding_statistics(pairs(count, lambda i: {"embedding": [1.0, i]}))


def texts(count: int) -> object:
    row = {"own_logprobs": [-1.0], "kl": [0.1], "same_top": [1]}
    return text_table(pairs(count, lambda i: {"index": i, **row}))


@pytest.mark.parametrize(("work", "most"), [(label_table, 120), (documents, 120), (vectors, 60), (texts, 80)])
def test_rows_are_arrays(work: Callable[[int], object], most: int) -> None:
    """A list of a float a row would need 32 bytes more, one of a row's object over 200."""
    assert (peak(work, MANY) - peak(work, FEW)) / (MANY - FEW) < most


def test_statistics_of_labels_need_few_arrays() -> None:
    tables = {count: label_table(count) for count in (FEW, MANY)}
    label_statistics(tables[FEW])
    peaks = {count: peak(lambda count: label_statistics(tables[count]), count) for count in tables}
    assert (peaks[MANY] - peaks[FEW]) / (MANY - FEW) < 120
