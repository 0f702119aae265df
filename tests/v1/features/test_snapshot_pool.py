"""Snapshots of states: found by the step after the one that saves them, and evicted by their last use."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.v1.features.states.snapshot_pool import SnapshotPool
from vllm.v1.request import Request

OWNER, OTHER = (Request(name, [1, 2], SamplingParams(max_tokens=1)) for name in ("owner", "other"))
A, B, C = b"a", b"b", b"c"


def test_the_step_that_saves_does_not_load() -> None:
    pool = SnapshotPool(2)
    snapshot = pool.save(A, OWNER)
    assert pool.find(A) is None and pool.saver(A) is OWNER
    assert pool.save(A, OTHER) is None, "there is one"
    pool.end_step()
    assert pool.find(A) == snapshot and pool.saver(A) is None


def test_the_least_recently_used_is_evicted() -> None:
    pool = SnapshotPool(2)
    for key in (A, B):
        pool.save(key, OWNER)
        pool.end_step()
    pool.use(A)
    kept = pool.find(A)
    assert pool.save(C, OWNER) is not None
    pool.end_step()
    assert pool.find(A) == kept and pool.find(B) is None and pool.find(C) is not None
    assert len(pool) == 2 and pool.usage == 1.0


def test_a_step_saves_to_no_snapshot_twice() -> None:
    pool = SnapshotPool(2)
    assert len({pool.save(A, OWNER), pool.save(B, OTHER)}) == 2
    assert pool.save(C, OWNER) is None
    assert pool.drop_saved(OTHER) and pool.save(C, OWNER) is not None


def test_what_is_forgotten_is_free() -> None:
    pool = SnapshotPool(3)
    saved = {pool.save(key, OWNER) for key in (A, B, C)}
    pool.end_step()
    pool.forget(A)
    pool.forget(A)
    pool.forget_snapshots({pool.find(B)})
    pool.reset()
    assert len(pool) == 0 and {pool.save(key, OWNER) for key in (A, B, C)} == saved
