"""Readings are of float32 logits whatever the model's dtype: the sums of its products, whoever multiplies.

The head's logits reach 16 and more, where bfloat16 has at most sixteen values to the unit: rounded, many tie.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from layouts import ON_CUDA, needs_kernels
from models_util import make_random_model, random_prompts
from pretend_cuda import pretending
from pretend_tensors import held
from readings_reference import rank_window
from torch import Tensor

from vllm import LLM, RequestOutput, SamplingParams
from vllm.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.ops import float_linear
from vllm.ops._dispatch import force
from vllm.ops.packed_linear import EXACT

VOCAB = 797
# Two blocks, whose hidden states are kept beside them, and one token more, of a longer prompt.
(PROMPT,) = random_prompts(VOCAB, (33,))
IDS = list(range(0, VOCAB, 8))


class Way(NamedTuple):
    """Who multiplies: a device ("cuda, tiles" has no products that come out in float32), VLLM_CPU_GEMM, and the
    layout that the layers must have got by that."""

    device: str = "cpu"
    gemm: str = ""
    layers: str = "plain"
    dtype: str = "bfloat16"
    tied: bool = False


WAYS = [
    *(
        pytest.param(Way("cpu", name, name), marks=needs_kernels, id=name)
        for name in ("packed_f32", "packed_bf16_dot", "packed_fp16")
    ),
    pytest.param(Way("cpu", "", "packed_f32", "float16"), marks=needs_kernels, id="float16"),
    pytest.param(Way(tied=True), id="no kernels"),
    pytest.param(Way(dtype="float16"), id="no kernels, float16"),
    pytest.param(Way("cuda", tied=True), marks=ON_CUDA, id="cuda"),
    pytest.param(Way("cuda, tiles"), marks=ON_CUDA, id="cuda, tiles"),
]


class Model(NamedTuple):
    folder: Path
    head: Tensor  # its weight, float64 [V, H]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Model]:
    """By whether the head's weight is the embedding's."""
    made = {}
    # The sizes of their final hidden states differ.
    for tied, scale in ((True, 5), (False, 10)):
        folder = tmp_path_factory.mktemp("model")
        _, hf_model = make_random_model("llama", "small", folder, vocab_size=VOCAB, tie_word_embeddings=tied)
        with torch.no_grad():
            hf_model.lm_head.weight.mul_(scale)
        hf_model.bfloat16().save_pretrained(folder)
        made[tied] = Model(folder, hf_model.lm_head.weight.detach().double())
    return made


@contextlib.contextmanager
def taking(way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products within the context are taken in this way."""
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.setenv("VLLM_CPU_GEMM", way.gemm)
    if way.device == "cuda, tiles":
        monkeypatch.setattr(float_linear, "_gives_float32", lambda device: False)
    with contextlib.ExitStack() as stack:
        if way.device == "cpu" and way.layers == "plain":
            stack.enter_context(force("reference"))
        if way.device != "cpu" and not torch.cuda.is_available():
            stack.enter_context(pretending())
        yield


def make_llm(folder: Path, way: Way, **fields: Any) -> LLM:
    return LLM(
        str(folder),
        device=way.device.partition(",")[0],
        dtype=way.dtype,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=1,
        gpu_memory_utilization=0.3,
        cache_hidden_states=True,
        **fields,
    )


def read(llm: LLM, prompt: list[int], **fields: Any) -> RequestOutput:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 1, "ignore_eos": True, **fields})
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return output


def head_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Filled with what heads are given and give from now on: hidden states and logits, on the CPU."""
    calls: list[tuple[Tensor, Tensor]] = []
    forward = ParallelLMHead.forward

    def recording(head: ParallelLMHead, hidden: Tensor) -> Tensor:
        logits = forward(head, hidden)
        calls.append((held(hidden).to("cpu", copy=True), held(logits).to("cpu", copy=True)))
        return logits

    monkeypatch.setattr(ParallelLMHead, "forward", recording)
    return calls


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_the_float32_sums(way: Way, models: dict[bool, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, weight = models[way.tied]
    with taking(way, monkeypatch):
        llm = make_llm(folder, way, enforce_eager=True)
        parts = llm.llm_engine.engine_core.executor.worker.model_runner.model
        assert {part.packed.layout for part in parts.model.modules() if hasattr(part, "packed")} == {way.layers}
        assert parts.lm_head.packed.layout in (("plain",) if way.layers == "plain" else EXACT)
        calls = head_calls(monkeypatch)
        # A block whose prompt is read keeps its hidden states, so that the longer prompt is read from the very ones
        # that the shorter one's token was drawn from; chosen tokens alone are read without logits where that is quick.
        generated = read(llm, PROMPT[:-1], logprob_token_ids=IDS, prompt_logprobs=1)
        longer = [read(llm, PROMPT, prompt_logprob_token_ids=IDS, prompt_logprobs=topk) for topk in (None, 5)]
    for hidden, logits in calls:
        assert logits.dtype == torch.float32
        assert (logits.double() - hidden.double() @ weight.t()).abs().max() < 1e-4
    (hidden, own), truth = calls[0], calls[0][0][0].double() @ weight.t()
    assert len(hidden) == 1 and 16 < own.abs().max() < 32
    first = generated.outputs[0].logprobs.select(IDS)
    np.testing.assert_array_equal(first.logits[0], own[0, IDS])
    np.testing.assert_array_equal(first.ranks[0], ranks_of(own[0]))
    assert (ranks_of(own[0].bfloat16()) != ranks_of(own[0])).any(), "rounding would show"
    distance = 1e-5 + 2 * (own[0].double() - truth).abs().max().item()
    for output in longer:
        assert output.num_cached_tokens == len(PROMPT) - 1
        same = output.prompt_logprobs.select(IDS)
        np.testing.assert_allclose(same.logits[-1], first.logits[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(same.logprobs[-1], first.logprobs[0], rtol=0, atol=1e-5)
        for token_id, rank in zip(IDS, same.ranks[-1], strict=True):
            best, worst = rank_window(truth.numpy(), token_id, distance)
            assert best <= rank <= worst


def ranks_of(row: Tensor) -> np.ndarray:
    """The ranks of IDS among a row's logits [V]."""
    return (1 + (row[None, :] > row[IDS][:, None]).sum(dim=1)).numpy()


@pytest.mark.parametrize("device", [pytest.param(name, marks=ON_CUDA) for name in ("cuda", "cuda, tiles")])
def test_graphs_give_them_too(device: str, models: dict[bool, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way(device)
    with taking(way, monkeypatch):
        llm = make_llm(models[way.tied].folder, way)
        calls = head_calls(monkeypatch)
        output = read(llm, PROMPT, logprob_token_ids=IDS, max_tokens=4)
    # Once for the prompt; then warming up and recording, of which the replays are.
    assert len(calls) == 3
    logits = torch.from_numpy(output.outputs[0].logprobs.select(IDS).logits)
    assert logits.shape == (4, len(IDS))
    assert (logits != logits.bfloat16()).any(dim=1).all()
