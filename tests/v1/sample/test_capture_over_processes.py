"""LogitsCapturingSampler, requests' functions and seeds over two ranks, of which one is another process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, byte_ids
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_capturing_sampler import LogitsCapturingSampler
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

INDICES = [2, 0, VOCAB_SIZE - 1, VOCAB_SIZE // 2, 65, 2]
PROMPTS = [byte_ids(text) for text in ("one", "a second, longer prompt", "3")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """(one rank, two ranks)."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        together = make_tiny_llm(folder, tensor_parallel_size=2)
    yield make_tiny_llm(folder), together
    together.llm_engine.engine_core.shutdown()


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 5, "temperature": 0, "ignore_eos": True, **fields})


def moved_bytes(llm: LLM) -> int:
    return sum(llm.llm_engine.engine_core.stats()["collective_bytes"].values())


@pytest.mark.parametrize("indices", [INDICES, None], ids=["columns", "rows"])
def test_captures_what_one_rank_captures(pair, indices):
    captures = []
    for llm in pair:
        with LogitsCapturingSampler(indices).install(llm) as capture:
            outputs = llm.generate(PROMPTS, params(logprob_token_ids=INDICES), use_tqdm=False)
        captures.append(capture.get_captured_logits())
        for output in outputs:
            own = capture.get_captured_logits(output.request_id)
            own = own if indices is not None else own[:, INDICES]
            read = output.outputs[0].logprobs.select(INDICES[:5]).logits
            assert np.array_equal(own[:, :5].numpy(), read), "the readings are of the logits that were captured"
    alone, together = captures
    assert together.shape == alone.shape == (15, VOCAB_SIZE if indices is None else len(INDICES))
    # The model's sums differ by their order.
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)


def test_chosen_columns_move_little(pair):
    _, llm = pair
    one_token = params(max_tokens=1)
    llm.generate([PROMPTS[0]], one_token, use_tqdm=False)
    moved = []
    for indices in ([], [1, 200, 3], None):
        llm.reset_prefix_cache()
        before = moved_bytes(llm)
        with LogitsCapturingSampler(indices).install(llm):
            llm.generate([PROMPTS[0]], one_token, use_tqdm=False)
        moved.append(moved_bytes(llm) - before)
    assert moved[1] - moved[0] == 3 * 4
    assert moved[2] - moved[0] == -(-VOCAB_SIZE // 2) * 4


def test_two_at_a_time_leave_in_any_order(pair):
    _, llm = pair
    captures = [LogitsCapturingSampler([1]).install(llm), LogitsCapturingSampler([1, 2]).install(llm)]
    for capture in captures:
        llm.generate([PROMPTS[0]], params(max_tokens=1), use_tqdm=False)
        capture.uninstall()
    llm.generate([PROMPTS[0]], params(max_tokens=1), use_tqdm=False)
    assert [tuple(capture.get_captured_logits().shape) for capture in captures] == [(1, 1), (2, 2)]


def test_bad_indices_install_nothing_anywhere(pair):
    _, llm = pair
    with pytest.raises(VLLMValidationError, match=rf"got {VOCAB_SIZE}"):
        LogitsCapturingSampler([VOCAB_SIZE]).install(llm)
    with LogitsCapturingSampler([1]).install(llm) as capture:
        llm.generate([PROMPTS[0]], params(max_tokens=1), use_tqdm=False)
    assert capture.get_captured_logits().shape == (1, 1)


def test_seeds_and_requests_functions(pair):
    """A closure, which no pipe could carry, runs in this process alone."""
    seen = []

    def note(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((*output_ids, len(logits)))
        return logits.index_add(0, torch.tensor([70, 200]), torch.tensor([3.0, 3.0]))

    def run(llm: LLM) -> list[list[int]]:
        own = [params(temperature=1.0, seed=seed) for seed in (1, -5)]
        own.append(params(temperature=1.0, seed=3, logits_processors=[note]))
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, own, use_tqdm=False)]

    alone, together = map(run, pair)
    assert alone == together
    assert len(seen) == 10 and seen[:5] == seen[5:]
    assert {entry[-1] for entry in seen} == {VOCAB_SIZE}


def test_custom_processors_stay_in_this_process(tmp_path):
    """The processor is of a class that no other process could import."""

    def force(token_id: torch.Tensor, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, token_id, 1000.0)

    class Force(AdapterLogitsProcessor):
        def is_argmax_invariant(self):
            return False

        def new_req_logits_processor(self, params):
            token_id = (params.extra_args or {}).get("force")
            return None if token_id is None else partial(force, torch.tensor([token_id]))

    llm = make_tiny_llm(make_tiny_model(tmp_path), tensor_parallel_size=2, logits_processors=[Force])
    wanted = [0, VOCAB_SIZE - 1, 65]
    own = [params(extra_args={"force": token_id}) for token_id in wanted]
    outputs = llm.generate(PROMPTS, own, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [[token_id] * 5 for token_id in wanted]
    llm.llm_engine.engine_core.shutdown()
