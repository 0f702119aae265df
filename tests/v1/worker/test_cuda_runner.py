"""The model runner on CUDA: graphs, copies and steps ahead give what plain steps give, and nothing waits in between."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from models_util import ARCHITECTURES, make_random_model
from pretend_cuda import pretending
from scripted_drafters import following, speculate
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams
from vllm.v1.features.drafts.runner import Speculator
from vllm.v1.worker.gpu.buffer_utils import upload, upload_all, upload_into
from vllm.v1.worker.gpu.replay.decode_graphs import ladder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of each architecture; "tiny" has a tokenizer, too."""
    folders = {"tiny": make_tiny_model(tmp_path_factory.mktemp("tiny"))}
    for arch in ARCHITECTURES:
        folders[arch], _ = make_random_model(arch, "odd", tmp_path_factory.mktemp(arch))
    return folders


@pytest.fixture(scope="module")
def folder(folders):
    return folders["tiny"]


@pytest.fixture(
    scope="module",
    autouse=True,
    params=[
        pytest.param("pretended", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")),
        pytest.param("real", marks=pytest.mark.gpu),
    ],
)
def cuda(request, folders):
    """A CUDA device, where there is none a pretended one."""
    with contextlib.nullcontext() if request.param == "real" else pretending():
        yield


def make_llm(folder, **fields):
    return make_tiny_llm(folder, **{"device": "cuda", "max_num_seqs": 9, **fields})


def runner_of(llm):
    return llm.llm_engine.engine_core.executor.worker.model_runner


KINDS = [
    {"temperature": 0},
    {"temperature": 0, "logprob_token_ids": [3, 9, 7], "logprobs": 2},
    {"seed": 1, "logprobs": 1, "top_k": 20},
    {"seed": 2, "top_p": 0.8, "min_p": 0.01, "stop_token_ids": list(range(40, 90))},
    {"temperature": 0, "repetition_penalty": 1.4, "logprobs": 3, "logprobs_mode": "processed_logprobs"},
    {"seed": 3, "bad_words": ["a"], "min_tokens": 4},
    {"temperature": 0, "prompt_logprobs": 2, "logprobs": 0},
    {"temperature": 0, "logprobs": 1, "logprob_entropy": True},
]


def results(llm, kinds):
    params = [SamplingParams(**{"max_tokens": 5 + 2 * index, **kind}) for index, kind in enumerate(kinds)]
    prompts = [{"prompt_token_ids": [5] * 16 + [3 + index] * (4 + 3 * index)} for index in range(len(kinds))]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert is_empty(llm)
    return outputs


BATCHES = [KINDS, KINDS[:2] * 4, KINDS[:1] * 3]


@pytest.fixture(scope="module")
def plain(folder, cuda):
    """Each batch's outputs by steps that are neither replayed nor ahead."""
    llm = make_llm(folder, enforce_eager=True, async_scheduling=False)
    return [results(llm, kinds) for kinds in BATCHES]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enforce_eager": True},
        {"async_scheduling": False},
        {"num_gpu_blocks_override": 20},
        {"num_gpu_blocks_override": 12, "swap_space": 1e-3},
    ],
    ids=["graphs", "eager", "in step", "few blocks", "swap"],
)
def test_graphs_and_steps_ahead_give_what_plain_steps_give(folder, plain, fields):
    llm = make_llm(folder, **fields)
    for kinds, expected in zip(BATCHES, plain, strict=True):
        assert llm.reset_prefix_cache()
        for _ in range(2):  # without cached prefixes, and with them
            for ours, theirs in zip(results(llm, kinds), expected, strict=True):
                assert ours.token_ids == theirs.token_ids and ours.finish_reason == theirs.finish_reason
                if theirs.logprobs is not None:
                    assert ours.logprobs.token_ids.tolist() == theirs.logprobs.token_ids.tolist()
                    # Kernels order their sums by the number of rows, which padding changes: some float32 roundings
                    # of sums over a width of 64, on logits of about 1.
                    np.testing.assert_allclose(ours.logprobs.logprobs, theirs.logprobs.logprobs, atol=2e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_gives_what_it_gives_on_the_cpu(folders, arch):
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)] * 3
    prompts = [{"prompt_token_ids": list(range(3, 20 + 9 * index))} for index in range(3)]
    outputs = []
    for device in ("cuda", "cpu"):
        llm = LLM(
            str(folders[arch]),
            device=device,
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=64,
            max_num_seqs=4,
            gpu_memory_utilization=0.3,
        )
        outputs.append(llm.generate(prompts, params, use_tqdm=False))
    for ours, theirs in zip(*outputs, strict=True):
        ours_generated, theirs_generated = ours.outputs[0], theirs.outputs[0]
        assert ours_generated.token_ids == theirs_generated.token_ids
        # float32's rounding of sums in another order, on logits of about 1.
        for own, other in (
            (ours_generated.logprobs, theirs_generated.logprobs),
            (ours.prompt_logprobs, theirs.prompt_logprobs),
        ):
            np.testing.assert_allclose(own.logprobs, other.logprobs, atol=2e-4)


def test_every_size_is_recorded_and_replayed(folder):
    llm = make_llm(folder)
    steps = runner_of(llm).replay.steps
    assert sorted(steps._steps) == ladder(9)
    replays = []
    for size, step in steps._steps.items():
        step.replay = lambda size=size, replay=step.replay: (replays.append(size), replay())
    results(llm, [{"temperature": 0, "ignore_eos": True, "logprobs": 1}] * 9)
    assert set(replays) == set(ladder(9))


@pytest.mark.parametrize("fields", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_nothing_waits_before_sampling_ends(folder, fields):
    llm = make_llm(folder, **fields)
    kinds = [*KINDS, {"temperature": 0, "prompt_logprob_token_ids": [3, 9], "max_tokens": 1}]
    results(llm, kinds)  # kernels are compiled, graphs recorded
    runner = runner_of(llm)
    execute = runner.execute_model

    def guarded(step):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.execute_model = guarded
    results(llm, kinds)


def test_uploads():
    device = torch.device("cuda", 0)
    arrays = [np.arange(5), np.arange(12, dtype=np.int32).reshape(3, 4), np.empty(0, np.int32), np.ones(3, np.int32)]
    for array, tensor in zip(arrays, upload_all(arrays, device), strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
    target = torch.zeros((4, 6), dtype=torch.int32, device=device)
    # A pinned copy is not handed out again while it is on its way: the device is busy, the host far ahead of it.
    torch.cuda._sleep(50_000_000)
    tensors = []
    for value in range(50):
        array = np.full((3, 4), value, np.int32)
        tensors.append(upload(array, device))
        upload_into(target[:3, :4], array)
        array.fill(-1)
    assert [int(tensor[2, 3]) for tensor in tensors] == list(range(50))
    assert target[:3, :4].eq(49).all() and not target[3:].any()


def test_drafts_give_what_plain_steps_give(folder):
    kinds = KINDS[1:7]
    plain = results(make_llm(folder, enforce_eager=True, async_scheduling=False), kinds)
    texts = [[5] * 16 + [3 + index] * (4 + 3 * index) + list(plain[index].token_ids) for index in range(len(kinds))]
    right = following(texts)
    llm = make_llm(folder, async_scheduling=False)
    for guess in (right, lambda tokens, room: [*right(tokens, room)[: len(tokens) % 4], 3]):
        drafter = speculate(llm, guess)
        assert_near(results(llm, kinds), plain)
        assert drafter.num_accepted > 10
    settings = {"model": str(folder), "num_speculative_tokens": 3}
    llm = make_llm(folder, enforce_eager=True, speculative_config=settings)
    speculator = runner_of(llm).guest(Speculator)
    speculator.lengths = None  # also where that does not pay
    assert_near(results(llm, kinds), plain)
    assert llm.llm_engine.engine_core.stats()["num_accepted_tokens"] > 10


def assert_near(outputs, plain):
    for ours, theirs in zip(outputs, plain, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.finish_reason == theirs.finish_reason
        if theirs.logprobs is not None:
            for own, wanted in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert list(own) == list(wanted)
                assert [each.rank for each in own.values()] == [each.rank for each in wanted.values()]
                assert [each.logprob for each in own.values()] == pytest.approx(
                    [each.logprob for each in wanted.values()], abs=1e-4
                )
