"""Decode steps of CUDA, recorded by a stand-in: every bit is that of steps that are not recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models_util import make_random_model
from pretend_cuda import pretending
from thread_ranks import make_thread_llm
from tiny_llm import is_empty, make_tiny_llm

from vllm import SamplingParams
from vllm.distributed.communicator import Communicator
from vllm.engine.arg_utils import EngineArgs
from vllm.ops._dispatch import cpu_ops
from vllm.v1.features.states.memory import StateSlots
from vllm.v1.worker.gpu.cuda import GraphRecorder
from vllm.v1.worker.gpu.replay.decode_graphs import DecodeGraphs, ladder
from vllm.v1.worker.gpu.replay.make import Replay
from vllm.v1.worker.gpu.replay.piecewise_graphs import PiecewiseGraphs

pytestmark = pytest.mark.skipif(cpu_ops() is None, reason="rows are computed alike by the C++ operators alone")

RUNNER = "vllm.v1.worker.gpu.model_runner"
MAKE = "vllm.v1.worker.gpu.replay.make"
FIELDS = {"max_num_seqs": 7, "max_logprob_token_ids": -1}


class Replays:
    """Runs what was recorded once more, into the tensors that the recording returned."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replays = 0

    def record(self, function):
        function()
        result = function()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replays += 1
            for mine, new in zip(tensors_of(result), tensors_of(function()), strict=True):
                mine.copy_(new)

        for tensor in tensors_of(result):
            tensor.fill_(-3)  # a recording is not a run
        return result, replay


class LazyCopies:
    """Copies at the latest time that CUDA's streams would: before what comes after a fence, or when waited for."""

    def __init__(self) -> None:
        self._pending = []

    def start(self, output):
        pairs = []

        def move(tensor):
            pairs.append((torch.full_like(tensor, -7), tensor))
            return pairs[-1][0]

        copy = output.moved(move)
        self._pending.append(pairs)

        def take():
            self._copy(pairs)
            return copy

        return take

    def fence(self) -> None:
        for pairs in self._pending:
            self._copy(pairs)

    @torch.inference_mode()
    def _copy(self, pairs) -> None:
        while pairs:
            host, tensor = pairs.pop()
            host.copy_(tensor)


def tensors_of(result) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in tensors_of(part)] if isinstance(result, tuple) else []


@pytest.fixture
def make_llm(folder, monkeypatch):
    """make(**fields) -> an engine with graphs; make.eager(**fields) -> without."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")

    def make(**fields):
        with monkeypatch.context() as patch:
            patch.setattr(f"{MAKE}.graph_recorder", lambda device, group: Replays())
            # Not of decodes, and no replay on the CPU.
            patch.setattr(PiecewiseGraphs, "record", lambda *args: None)
            patch.setattr(f"{RUNNER}.host_copies", lambda device, group: LazyCopies())
            return make_tiny_llm(folder, **{**FIELDS, "async_scheduling": True, **fields})

    make.eager = lambda **fields: make_tiny_llm(folder, **{**FIELDS, "enforce_eager": True, **fields})
    return make


def runner_of(llm):
    return llm.llm_engine.engine_core.executor.worker.model_runner


def results(llm, kinds, num_prompts=None):
    """Results of requests with these parameters, those of a kind in turn; they end one after another."""
    params = [
        SamplingParams(
            **{"max_tokens": 4 + 3 * index, "ignore_eos": True, "temperature": 0, **kinds[index % len(kinds)]}
        )
        for index in range(num_prompts or len(kinds))
    ]
    prompts = [{"prompt_token_ids": [3 + index] * (5 + 4 * index)} for index in range(len(params))]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert is_empty(llm)
    return [(output.token_ids, output.finish_reason, plain(output.logprobs)) for output in outputs]


def plain(readings):
    if readings is None:
        return None
    fields = ("token_ids", "logprobs", "logits", "ranks", "lse", "start_indices")
    return [getattr(readings, field).tolist() for field in fields] + [np.nan_to_num(readings.entropy).tolist()]


def ids(count):
    return list(range(5, 5 + count))


KINDS = {
    "tokens alone": [{}],
    "logprobs alone": [{"logprobs": 0}],
    "few ids": [{"logprob_token_ids": ids(3)}, {"logprob_token_ids": ids(8)}, {}],
    "more ids": [{"logprob_token_ids": ids(20), "logprobs": 2}, {"logprobs": 20}],
    "many ids": [{"logprob_token_ids": ids(100)}, {}, {"logprob_token_ids": ids(1)}],
    "too many ids": [{"logprob_token_ids": ids(200)}, {"logprobs": 40}],
    "entropy": [{"logprobs": 1, "logprob_entropy": True}],
    "processed": [{"repetition_penalty": 1.5, "logprobs": 2}, {"logit_bias": {9: 3.0}}],
    "drawn": [{"temperature": 1.0, "seed": 1, "logprobs": 1}, {"logprobs": 2}],
    "not drawn": [{}, {"max_tokens": 0, "logprobs": 1}],
}


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_every_bit_is_that_of_steps_that_are_not_recorded(make_llm, async_scheduling):
    llm, eager = make_llm(async_scheduling=async_scheduling), make_llm.eager()
    for name, kinds in KINDS.items():
        for num_prompts in (1, 3, 6):
            assert results(llm, kinds, num_prompts) == results(eager, kinds, num_prompts), (name, num_prompts)
    mixed = [kind for kinds in KINDS.values() for kind in kinds]
    assert results(llm, mixed) == results(eager, mixed)


def test_states_of_padding_are_nobodys(tmp_path, monkeypatch):
    """With fewer states than slots, so that padding's number is none of a row."""
    make_random_model("lfm2", "small", tmp_path, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    slots = StateSlots(num_requests=6, num_snapshots=4, snapshot_interval=16)
    monkeypatch.setattr("vllm.v1.executor.worker.plan_states", lambda *args: slots)
    found = []
    for eager in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(f"{MAKE}.graph_recorder", lambda device, group: Replays())
            patch.setattr(f"{RUNNER}.host_copies", lambda device, group: LazyCopies())
            fields = {"async_scheduling": True, "skip_tokenizer_init": True, "enforce_eager": eager}
            llm = make_tiny_llm(tmp_path, **{**FIELDS, **fields})
        own = [{**kind, "detokenize": False} for name in ("logprobs alone", "few ids", "drawn") for kind in KINDS[name]]
        found.append([results(llm, own, count) for count in (1, 3, 6, 9, 9)])
        if not eager:
            runner = runner_of(llm)
            assert runner.replay_maker.graphs.num_replays > 20 and runner.replay.pieces is None
    assert found[0] == found[1]


def test_one_replay_does_it_all_for_plain_rows(make_llm):
    # With it, all but the last token of a prompt that comes again may be there, and its step is a replay, too.
    llm = make_llm(enable_prefix_caching=False)
    recorder = runner_of(llm).replay_maker.graphs
    # The model at each size, and the usual widths: tokens alone, few ids, few of the most likely tokens.
    at_start = len(ladder(7)) * 4
    assert recorder.num_recorded == at_start
    for name, num_later in (("few ids", 0), ("more ids", 3)):
        results(llm, KINDS[name], 3)
        assert recorder.num_recorded == at_start + num_later  # the batch sizes 3, 2 and 1, of which 3 is padded
        before = recorder.num_replays
        again = results(llm, KINDS[name], 3)
        assert recorder.num_recorded == at_start + num_later
        num_decodes = max(len(tokens) for tokens, _, _ in again) - 1
        assert recorder.num_replays - before == 2 * num_decodes


def test_the_graphs_that_were_not_used_for_longest_go(make_llm):
    llm, eager = make_llm(), make_llm.eager()
    graphs = runner_of(llm).replay.greedy
    few = sum(graph.num_bytes for graph in graphs._graphs.values()) // 3
    graphs._max_bytes = few
    for name in ("more ids", "few ids", "many ids", "more ids"):
        assert results(llm, KINDS[name], 3) == results(eager, KINDS[name], 3)
        assert sum(graph.num_bytes for graph in graphs._graphs.values()) <= few
    assert all(widths.num_token_ids == 32 or widths.num_topk == 32 for _, widths in list(graphs._graphs)[-3:])


def test_padding_writes_to_its_own_block_alone(make_llm):
    llm = make_llm(num_gpu_blocks_override=40, enable_prefix_caching=False)
    runner = runner_of(llm)
    assert all(cache.shape[0] == 41 for pair in runner.kv_caches for cache in pair)
    results(llm, [{}], 7)  # leaves its slots and blocks behind in the inputs of the largest step
    for pair in runner.kv_caches:
        for cache in pair:
            cache.fill_(100.0)
    (table,) = runner.block_tables
    owned, set_row, append = set(), table.set_row, table.append
    table.set_row = lambda slot, blocks: owned.update(blocks) or set_row(slot, blocks)
    table.append = lambda slot, blocks: owned.update(blocks) or append(slot, blocks)
    results(llm, [{"max_tokens": 6}], 5)
    written = {
        block for pair in runner.kv_caches for cache in pair for block in range(40) if (cache[block] != 100.0).any()
    }
    assert written and written <= owned


def test_lists_that_move_to_a_wider_table(make_llm):
    llm, eager = make_llm(), make_llm.eager()
    recorder = runner_of(llm).replay_maker.graphs
    # Few are recorded at the start; 200 are not replayed, but move the table that recordings read from.
    for count, num_recorded in ((3, 0), (20, 2), (3, 0), (100, 2), (200, 0), (3, 2), (100, 2), (3, 0)):
        before = recorder.num_recorded
        kinds = [{"logprob_token_ids": ids(count)[::-1]}]
        assert results(llm, kinds, 2) == results(eager, kinds, 2)
        assert recorder.num_recorded == before + num_recorded


def test_longer_contexts_are_not_replayed(make_llm):
    llm, eager = make_llm(max_seq_len_to_capture=12), make_llm.eager()
    recorder = runner_of(llm).replay_maker.graphs
    before = recorder.num_replays
    assert results(llm, [{"max_tokens": 20}], 1) == results(eager, [{"max_tokens": 20}], 1)
    # The prompt's 5 tokens are one step; those with 6 to 12 tokens of context are replayed.
    assert recorder.num_replays - before == 2 * 7


def test_captured_logits_go_by_the_sampler(make_llm):
    from vllm.v1.sample.logits_capturing_sampler import LogitsCapturingSampler

    llm, eager = make_llm(), make_llm.eager()
    captured = []
    for each in (llm, eager):
        with LogitsCapturingSampler([3, 9]).install(each) as capture:
            results(each, [{}], 3)
        captured.append(capture.get_captured_logits())
    assert len(captured[0]) and torch.equal(*captured)


def test_ranks_record_and_replay_alike(folder, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    eager = make_thread_llm(folder, 2, **FIELDS, enforce_eager=True)
    monkeypatch.setattr(f"{MAKE}.graph_recorder", lambda device, group: Replays())
    monkeypatch.setattr(PiecewiseGraphs, "record", lambda *args: None)
    llm = make_thread_llm(folder, 2, **FIELDS)
    recorders = [each.model_runner.replay_maker.graphs for each in llm.llm_engine.engine_core.executor.workers]
    for name in ("tokens alone", "few ids", "drawn"):
        assert results(llm, KINDS[name], 3) == results(eager, KINDS[name], 3)
    first, second = ((each.num_recorded, each.num_replays) for each in recorders)
    assert first == second and first[1] > 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretended where there is no device")
def test_collectives_of_replays_are_counted():
    """A rank that does nothing but replay is not one that stands still."""
    with pretending():
        group = Communicator()
        _, replay = GraphRecorder(torch.device("cuda", 0), group).record(
            lambda: group.count_again({"all_reduce": 2}, {"all_reduce": 64})
        )
        before = group.total_calls
        replay()
        replay()
        assert group.total_calls == before + 4 and group.num_bytes["all_reduce"] == 32 * group.total_calls


def test_the_ladder():
    assert ladder(1) == [1]
    assert ladder(5) == [1, 2, 4, 5]
    assert ladder(256)[:6] == [1, 2, 4, 8, 16, 24] and ladder(256)[-2:] == [248, 256]
    assert ladder(1000)[-1] == 512
    for most in (1, 3, 8, 9, 300, 512):
        assert ladder(most)[-1] == most and ladder(most) == sorted(set(ladder(most)))


def test_without_graphs_there_are_none(folder, make_llm):
    assert isinstance(runner_of(make_llm()).replay.steps, DecodeGraphs)
    llm = make_llm(enforce_eager=True)
    assert type(runner_of(llm).replay) is Replay and runner_of(llm).num_extra_blocks == 0


def test_the_setting(folder):
    def of(**fields):
        return EngineArgs(str(folder), device="cpu", **fields).create_engine_config().model_config

    assert of().max_seq_len_to_capture is None
    assert of(max_context_len_to_capture=7).max_seq_len_to_capture == 7
    with pytest.raises(ValueError, match="max_context_len_to_capture=7 and max_seq_len_to_capture=8 are one setting"):
        of(max_context_len_to_capture=7, max_seq_len_to_capture=8)
    with pytest.raises(ValueError, match="max_seq_len_to_capture must be an integer of at least 1, got 0"):
        of(max_seq_len_to_capture=0)
