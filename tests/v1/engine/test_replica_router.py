"""The router: every request goes to one replica, follows its prefix while that pays, and leaves nothing behind."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.engine import replica_router
from vllm.v1.engine.replica_router import GENERATED_TOKENS, ReplicaRouter

BLOCK = 4


def make_router(num_replicas: int = 2, num_blocks: int = 1000, **fields) -> ReplicaRouter:
    return ReplicaRouter([num_blocks] * num_replicas, BLOCK, **fields)


def num_known_blocks(router: ReplicaRouter) -> list[int]:
    """Blocks that the router expects in each replica's prefix cache."""
    return [len(replica.known) for replica in router._replicas]


def prompt(name: int, num_tokens: int) -> list[int]:
    """Prompts of one name begin alike, others differ from the first token on."""
    return [1000 + name, *range(num_tokens - 1)]


class Traffic:
    """Requests with names of their own, sent through a router."""

    def __init__(self, router: ReplicaRouter) -> None:
        self.router = router
        self.replica_of: dict[str, int] = {}

    def send(self, token_ids: list[int], salt: str | None = None, n: int = 1, max_tokens: int = 1) -> int:
        name = f"r{len(self.replica_of)}"
        self.replica_of[name] = self.router.route(name, token_ids, salt, n, max_tokens)
        return self.replica_of[name]

    def send_and_finish(self, token_ids: list[int], salt: str | None = None) -> int:
        chosen = self.send(token_ids, salt)
        self.router.end([f"r{len(self.replica_of) - 1}"])
        return chosen


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # prefix
        st.integers(1, 60),  # prompt tokens
        st.integers(1, 3),  # n
        st.sampled_from([0, 1, 5, 1000]),  # max_tokens
        st.integers(0, 4),  # how many of the oldest requests end before
        st.booleans(),  # whether the oldest one left has begun
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(num_replicas=st.integers(2, 4), num_blocks=st.integers(1, 12), caches_prefixes=st.booleans(), requests=REQUESTS)
def test_any_traffic(num_replicas, num_blocks, caches_prefixes, requests):
    router = make_router(num_replicas, num_blocks, caches_prefixes=caches_prefixes)
    running: deque[str] = deque()
    for number, (name, num_tokens, n, max_tokens, num_ended, begins) in enumerate(requests):
        for _ in range(min(num_ended, len(running))):
            router.end([running.popleft()])
        if begins and running:
            router.begin([running[0], "nobody"])
        before = router.loads
        chosen = router.route(f"r{number}", prompt(name, num_tokens), None, n, max_tokens)
        assert 0 <= chosen < num_replicas
        # It never queues behind more than a whole prefill elsewhere.
        assert before[chosen] - min(before) <= num_tokens - 1
        if not caches_prefixes:
            assert before[chosen] == min(before)
        after = router.loads
        assert all(new == old for i, (new, old) in enumerate(zip(after, before, strict=True)) if i != chosen)
        # At least the last token is computed, and no more than everything n times.
        expected = n * min(max_tokens, GENERATED_TOKENS)
        assert n <= after[chosen] - before[chosen] - expected <= n * num_tokens
        assert f"r{number}" in router
        running.append(f"r{number}")
    router.begin(running)
    router.end(running)
    router.end(running)
    assert router.loads == [0] * num_replicas and not any(each in router for each in running)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(BLOCK + 1, 60)), min_size=1, max_size=40))
def test_one_request_at_a_time_stays_with_its_prefix(requests):
    traffic = Traffic(make_router(3))
    homes: dict[int, int] = {}
    for name, num_tokens in requests:
        chosen = traffic.send_and_finish(prompt(name, num_tokens))
        assert homes.setdefault(name, chosen) == chosen


def test_prompts_that_share_nothing_go_round():
    traffic = Traffic(make_router(3))
    chosen = [traffic.send_and_finish(prompt(name, 30)) for name in range(9)]
    assert Counter(chosen) == {0: 3, 1: 3, 2: 3} and chosen[:3] == chosen[3:6] == chosen[6:]


def test_the_load_is_what_is_left_to_do():
    traffic = Traffic(router := make_router())
    first = traffic.send(prompt(0, 41), n=2, max_tokens=7)
    # The second sequence counts only what follows the last full block before the last token.
    assert router.loads[first] == 41 + 1 + 2 * 7
    other = traffic.send(prompt(1, 10), max_tokens=10**6)
    assert other != first and router.loads[other] == 10 + GENERATED_TOKENS
    router.begin(["r0"])
    assert router.loads[first] == 2 * 7
    router.begin(["r0"])
    router.end(["r0"])
    assert router.loads[first] == 0
    router.end(["r1"])
    assert router.loads == [0, 0]
    traffic.send(prompt(0, 41))
    assert router.loads[first] == 41 - 10 * BLOCK + 1


def test_a_crowd_with_one_prompt_spreads():
    """As soon as the first replica has more to do than the prompt is long."""
    traffic = Traffic(router := make_router(4))
    counts = Counter(traffic.send(prompt(0, 101), max_tokens=4) for _ in range(2000))
    assert min(counts.values()) > 2000 / 4 - 101 and sum(counts.values()) == 2000
    assert max(router.loads) - min(router.loads) <= 101 + 4


@pytest.mark.parametrize("concurrency", [2, 4])
def test_few_requests_with_a_long_prefix_spread_in_time(concurrency):
    """The loads never differ by as much as the prefix is long, and yet no replica stays idle for good."""
    traffic = Traffic(router := make_router())
    home = traffic.send_and_finish(prompt(0, 800))
    sent: deque[str] = deque()
    chosen, waited = [], 0
    for number in range(500):
        idle = router.loads[1 - home] == 0
        waited += router.loads[home] if idle and 1 - home not in chosen else 0
        chosen.append(traffic.send([*prompt(0, 800), number], max_tokens=8))
        sent.append(f"r{number + 1}")
        if len(sent) == concurrency:
            router.end([sent.popleft()])
    first = chosen.index(1 - home)
    # Not before so much was waited as the prefix costs, and not much later.
    assert 800 <= waited < 900 and first < 400
    assert min(Counter(chosen[first:]).values()) > 0.4 * (500 - first)


def test_credit_is_spent():
    """A second prefix has to be waited for as long as the first."""
    traffic = Traffic(router := make_router())
    waits = []
    for name in (0, 1):
        (home,) = {traffic.send_and_finish(prompt(name, 400)) for _ in range(3)}
        for count in range(400):
            busy = f"r{len(traffic.replica_of)}"
            traffic.send(prompt(name, 400), max_tokens=8)
            if traffic.send_and_finish(prompt(name, 400)) != home:
                waits.append(count)
                router.end([busy])
                break
            router.end([busy])
    assert len(waits) == 2 and waits[0] > 10 and abs(waits[0] - waits[1]) <= 1


def test_a_busy_replica_gets_no_credit():
    """Documents with some questions each come faster than they can be answered: most are read once."""
    traffic = Traffic(router := make_router())
    waiting: deque[str] = deque()
    num_computed = 0
    for document in range(100):
        for question in range(5):
            before = sum(router.loads)
            traffic.send([*prompt(document, 400), *[question] * 8])
            num_computed += sum(router.loads) - before - 1
            waiting.append(f"r{len(traffic.replica_of) - 1}")
        # As many tokens are computed as come on average, by both replicas alike, behind some that wait.
        while len(waiting) > 40:
            router.end([waiting.popleft()])
    assert num_computed < 1.4 * 100 * (400 + 5 * 8)


def test_a_salt_makes_another_prefix():
    traffic = Traffic(make_router())
    homes = {salt: traffic.send_and_finish(prompt(0, 40), salt) for salt in (None, "a")}
    assert homes[None] != homes["a"]
    for salt in ("a", None, None, "a"):
        assert traffic.send_and_finish(prompt(0, 40), salt) == homes[salt]


def test_memory_is_bounded_and_the_beginning_stays_longest():
    traffic = Traffic(router := make_router(1, num_blocks=10))
    traffic.send_and_finish(prompt(0, 41))
    traffic.send_and_finish(prompt(1, 9))
    traffic.send(prompt(0, 41))
    assert router.loads == [41 - 8 * BLOCK + 1]
    router.end(["r2"])
    for name in range(2, 20):
        traffic.send_and_finish(prompt(name, 25))
        traffic.send_and_finish(prompt(0, 9))
        assert num_known_blocks(router) == [10]
    # Its beginning was used all the time.
    traffic.send(prompt(0, 41))
    assert router.loads == [41 - 2 * BLOCK + 1]


def test_memory_does_not_grow_with_the_cache(monkeypatch):
    monkeypatch.setattr(replica_router, "MAX_KNOWN_BLOCKS", 5)
    traffic = Traffic(router := make_router(num_blocks=10**9))
    for name in range(20):
        traffic.send_and_finish(prompt(name, 20))
    assert num_known_blocks(router) == [5, 5]


def test_emptied_caches_have_no_prefixes():
    traffic = Traffic(router := make_router())
    traffic.send_and_finish(prompt(0, 41))
    router.forget_prefixes()
    chosen = traffic.send(prompt(0, 41))
    assert router.loads[chosen] == 42 and sorted(num_known_blocks(router)) == [0, 10]
