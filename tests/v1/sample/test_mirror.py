"""A processor that keeps only what it is told agrees with the runner at every step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from mirror import MirrorProcessor
from tiny_llm import is_empty, make_tiny_llm

from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler

NUM_REQUESTS = 24


class Watch:
    """Compares the mirror with the runner's slots after every call of the sampler, and counts what happened."""

    def __init__(self, monkeypatch, params):
        self.params = params
        self.counts: Counter[str] = Counter()
        self.histories: dict[str, list[list[int]]] = {}  # outputs that the mirror saw, by request
        original = Sampler.__call__

        def watched(sampler, logits, slots, states):
            output = original(sampler, logits, slots, states)
            self.compare(logits, slots.tolist(), states)
            return output

        monkeypatch.setattr(Sampler, "__call__", watched)

    def compare(self, logits, slots, states):
        mirror = MirrorProcessor.last
        names = {slot: name for name, slot in states.req_id_to_slot.items()}
        by_name = {entry.params.extra_args["name"]: (i, entry) for i, entry in mirror.entries.items()}
        assert len(by_name) == len(mirror.entries)
        assert set(by_name) <= set(names.values())
        assert {names[slot] for slot in slots} <= set(by_name)
        assert mirror.logits.shape == (len(mirror.entries), logits.shape[1])
        for name, (index, entry) in by_name.items():
            slot = states.req_id_to_slot[name]
            start, end = states.prompt_len[slot], states.total_len[slot]
            assert entry.prompt == states.token_ids[slot, :start].tolist()
            assert entry.output == states.token_ids[slot, start:end].tolist()
            assert entry.params.seed == self.params[name].seed
            if slot in slots:
                assert torch.equal(mirror.logits[index], logits[slots.index(slot)])
                self.histories.setdefault(name, []).append(list(entry.output))
        self.count(mirror.updates[-1])

    def count(self, update):
        if update is None:
            self.counts["no news"] += 1
            return
        self.counts["removed"] += len(update.removed)
        self.counts["moved"] += len(update.moved)
        self.counts["back"] += sum(bool(output) for _, _, _, output in update.added)
        # Indices of a batch that did not grow are those of requests that were gone.
        self.counts["replaced"] += sum(index < update.batch_size - len(update.added) for index, *_ in update.added)


@pytest.mark.parametrize("seed", range(2))
def test_the_mirror_agrees(folder, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    # The blocks are too few for all that run, so some are preempted.
    llm = make_tiny_llm(
        folder,
        logits_processors=[MirrorProcessor],
        max_num_seqs=6,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=6,
        max_model_len=96,
    )
    engine = llm.llm_engine
    params = {
        f"r{i}": SamplingParams(
            seed=i, max_tokens=int(rng.integers(1, 24)), extra_args={"name": f"r{i}"}, temperature=float(i % 2)
        )
        for i in range(NUM_REQUESTS)
    }
    watch = Watch(monkeypatch, params)
    finished, aborted, waiting = {}, set(), list(params)
    while waiting or engine.has_unfinished_requests():
        while waiting and rng.random() < 0.5:
            name = waiting.pop(0)
            prompt = rng.integers(3, 200, rng.integers(1, 30)).tolist()
            engine.add_request(name, {"prompt_token_ids": prompt}, params[name])
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
        if rng.random() < 0.03 and watch.histories:
            name = str(rng.choice(list(watch.histories)))
            engine.abort_request([name])
            aborted.add(name)
    assert is_empty(llm)
    assert set(finished) | aborted == set(params)
    for name, token_ids in finished.items():
        assert watch.histories[name] == [token_ids[:length] for length in range(len(token_ids))]
    wanted = {"no news", "removed", "moved", "replaced", "back"}
    assert {what for what, count in watch.counts.items() if count} == wanted, watch.counts
