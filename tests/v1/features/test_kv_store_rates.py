"""A request waits for the store where that is faster than computing."""

from __future__ import annotations

from vllm.v1.features.kv_store.rates import Rates

MIB = 2**20


def measured(bytes_a_second: float, tokens_a_second: float) -> Rates:
    rates = Rates()
    rates.reading.note(64 * MIB, 64 * MIB / bytes_a_second)
    rates.computing.note(2048, 2048 / tokens_a_second)
    return rates


def test_blocks_are_read_until_both_are_known():
    rates = Rates()
    assert rates.should_read(100 * MIB, 16)
    rates.reading.note(64 * MIB, 1000.0)
    assert rates.should_read(100 * MIB, 16)
    rates.computing.note(2048, 0.001)
    assert not rates.should_read(100 * MIB, 16)


def test_the_faster_one_is_chosen():
    # A second for either.
    rates = measured(100 * MIB, 1000)
    assert rates.should_read(90 * MIB, 1000) and not rates.should_read(110 * MIB, 1000)
    assert not rates.should_read(90 * MIB, 1000, num_bytes_before=20 * MIB)


def test_what_changes_is_followed():
    rates = measured(1000 * MIB, 1000)
    assert rates.should_read(100 * MIB, 1000)
    for _ in range(100):
        rates.reading.note(64 * MIB, 64.0)
    assert not rates.should_read(100 * MIB, 1000)
    for _ in range(100):
        rates.computing.note(2048, 2048.0)
    assert rates.should_read(100 * MIB, 1000)
