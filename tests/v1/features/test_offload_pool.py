"""The pool of host blocks against a model of it: a list of contents, oldest use first."""

from __future__ import annotations

import random

import pytest

from vllm.v1.features.swap.scheduler import OffloadPool


class Model:
    """A model of what the pool should hold."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.contents: list[bytes] = []
        self.of_this_step: set[bytes] = set()

    def use(self, content: bytes) -> None:
        self.contents.remove(content)
        self.contents.append(content)
        self.of_this_step.add(content)

    def store(self, content: bytes) -> bool:
        if content in self.contents:
            self.use(content)
            return False
        if len(self.contents) == self.num_blocks:
            idle = [each for each in self.contents if each not in self.of_this_step]
            if not idle:
                return False
            self.contents.remove(idle[0])
        self.contents.append(content)
        self.of_this_step.add(content)
        return True

    def forget(self, content: bytes) -> None:
        if content in self.contents:
            self.contents.remove(content)


def test_random_steps_against_the_model():
    rng = random.Random(0)
    num_full = num_refused = 0
    for _ in range(200):
        num_blocks = rng.randint(1, 6)
        pool, model = OffloadPool(num_blocks), Model(num_blocks)
        block_of: dict[bytes, int] = {}
        for _ in range(60):
            content = bytes([rng.randrange(10)])
            action = rng.choice(["store", "store", "store", "use", "end", "end", "forget", "reset"])
            if action == "store":
                known, stored = content in model.contents, model.store(content)
                block = pool.store(content)
                assert (block is not None) == stored
                num_refused += not stored and not known
                if block is not None:
                    block_of = {each: at for each, at in block_of.items() if at != block} | {content: block}
            elif action == "use" and content in model.contents:
                model.use(content)
                pool.use(content)
            elif action == "end":
                model.of_this_step.clear()
                pool.end_step()
            elif action == "forget" and not model.of_this_step:  # never while a step is being scheduled
                model.forget(content)
                if rng.random() < 0.5:
                    pool.forget(content)
                elif content in block_of and pool.find(content) is not None:
                    pool.forget_block(block_of[content])
            elif action == "reset" and rng.random() < 0.1 and not model.of_this_step:
                model.contents.clear()
                pool.reset()
            num_full += len(model.contents) == num_blocks
            assert {each for each in map(lambda i: bytes([i]), range(10)) if pool.find(each) is not None} == set(
                model.contents
            )
            assert all(pool.find(each) == block_of[each] for each in model.contents)
            assert pool.usage == len(model.contents) / num_blocks
    assert num_full > 1000 and num_refused > 50


def test_what_a_step_copies_keeps_its_place_until_the_step_is_known():
    pool = OffloadPool(2)
    first = pool.store(b"a")
    assert pool.store(b"b") != first
    assert pool.store(b"c") is None
    pool.end_step()
    pool.use(b"a")
    assert pool.store(b"c") is not None and pool.find(b"b") is None and pool.find(b"a") == first


def test_the_size_must_be_positive():
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        OffloadPool(0)
