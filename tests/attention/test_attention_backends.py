"""Every backend writes and attends alike; which one an engine gets, and what it says when that one cannot serve."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import attention_stand_ins as stand_ins
import numpy as np
import pytest
import torch
from models_util import make_random_model, random_prompts
from torch.nn import attention

from vllm import LLM, EngineArgs, SamplingParams
from vllm.attention import flashinfer, varlen
from vllm.attention.backend import AttentionMetadata, HostStep, PagedAttention
from vllm.attention.flashinfer import FlashInferAttention
from vllm.attention.options import AttentionOptions
from vllm.attention.select import check_backend, select_backend
from vllm.attention.varlen import VarlenAttention
from vllm.ops._dispatch import force
from vllm.v1.worker.gpu import model_runner

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 6, 2, 64, 0.14
OPTIONS = AttentionOptions(SCALE)
STEPS = {
    "mixed": [(3, 9), (1, 6), (8, 8), (1, 1)],
    "decodes first": [(1, 9), (1, 1), (3, 9), (8, 8)],
    "decode": [(1, 9), (1, 4), (1, 1)],
}


@pytest.fixture(params=["paged on CPU", "paged on CUDA", "varlen", "flashinfer"])
def backend(request, monkeypatch):
    if request.param == "varlen":
        return VarlenAttention(stand_ins.varlen_attn)
    if request.param == "flashinfer":
        return make_flashinfer(monkeypatch)
    return PagedAttention("cpu" if request.param == "paged on CPU" else "cuda")


def make_flashinfer(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", stand_ins)
    event = SimpleNamespace(query=lambda: True, record=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    return FlashInferAttention(CPU)


def make_step(backend, lengths):
    """A request for each (queries, tokens), its earlier tokens in the cache; q, k, v of the step; and every request's
    keys and values [tokens, heads, dim]."""
    torch.manual_seed(0)
    num_blocks = [-(-tokens // BLOCK_SIZE) for _, tokens in lengths]
    free = torch.randperm(sum(num_blocks) + 2).to(torch.int32)
    table = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
    shape = backend.kv_cache_shape(len(free), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    k, v, slots, kept = [], [], [], []
    for row, (queries, tokens) in enumerate(lengths):
        table[row, : num_blocks[row]], free = free[: num_blocks[row]], free[num_blocks[row] :]
        position = torch.arange(tokens)
        own = table[row, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        keys, values = torch.randn(2, tokens, KV_HEADS, HEAD_DIM)
        kept.append((keys, values))
        earlier = tokens - queries
        attn = AttentionMetadata(own[:earlier], table, table, table, 1, 1)
        backend.write_kv(keys[:earlier], values[:earlier], cache, attn)
        slots.append(own[earlier:])
        k.append(keys[earlier:])
        v.append(values[earlier:])
    queries, tokens = (torch.tensor(each, dtype=torch.int32) for each in zip(*lengths, strict=True))
    starts = torch.cat([torch.zeros(1), queries.cumsum(0)]).to(torch.int32)
    attn = AttentionMetadata(torch.cat(slots), table, starts, tokens, int(queries.max()), int(tokens.max()))
    attn.host = HostStep(starts.numpy(), tokens.numpy(), np.arange(len(lengths)), table.numpy())
    num_decodes = sum(count == 1 for count, _ in lengths)
    if all(count == 1 for count, _ in lengths[:num_decodes]):
        attn.num_decodes, attn.max_decode_len = num_decodes, max(seq_len for _, seq_len in lengths[:num_decodes])
    q = torch.randn(int(starts[-1]), HEADS, HEAD_DIM)
    return q, torch.cat(k), torch.cat(v), cache, attn, kept


def expected(q, attn, kept, window=None, softcap=None):
    """Softmax over all scores in float64."""
    starts = attn.query_start_loc.tolist()
    parts = []
    for row, (keys, values) in enumerate(kept):
        own = q[starts[row] : starts[row + 1]]
        parts.append(stand_ins.attend_pages(own, keys[None], values[None], [0], len(keys), SCALE, window, softcap))
    return torch.cat(parts)


@contextmanager
def operations_of(backend):
    """The C++ operators know cells alone."""
    if isinstance(backend, PagedAttention) and len(backend.kv_cache_shape(1, 1, 1, 1)) == 3:
        yield
    else:
        with force("reference"):
            yield


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_attends(backend, lengths):
    with operations_of(backend):
        q, k, v, cache, attn, kept = make_step(backend, lengths)
        backend.write_kv(k, v, cache, attn)
        got = backend.attend(q, cache, attn, OPTIONS)
    # float32 sums of a few terms of about 1.
    torch.testing.assert_close(got.double(), expected(q, attn, kept), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("limits", [{"window": 3}, {"softcap": 0.7}, {"window": 5, "softcap": 2.0}], ids=str)
def test_attends_with_options(backend, lengths, limits):
    # A backend that lacks an option leaves the layer to our kernels, over its own layout.
    with operations_of(backend):
        q, k, v, cache, attn, kept = make_step(backend, lengths)
        backend.write_kv(k, v, cache, attn)
        got = backend.attend(q, cache, attn, replace(OPTIONS, **limits))
        sinks = torch.full((HEADS,), 3.0)
        drained = backend.attend(q, cache, attn, replace(OPTIONS, **limits, sinks=sinks))
    torch.testing.assert_close(got.double(), expected(q, attn, kept, **limits), rtol=1e-5, atol=1e-5)
    # A sink takes some of every row's weight.
    assert (drained.norm(dim=-1) < got.norm(dim=-1)).all()


def test_rotates_what_it_writes(backend):
    angles = torch.rand(50, HEAD_DIM // 2) * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    # Position 0 of this table is no rotation.
    table[0] = torch.tensor([1.0] * (HEAD_DIM // 2) + [0.0] * (HEAD_DIM // 2))
    with operations_of(backend):
        q, k, v, cache, attn, kept = make_step(backend, STEPS["mixed"])
        still = torch.zeros(len(q), dtype=torch.int64)
        backend.rotate_and_write_kv(still, q, k, v, table, cache, attn)
        torch.testing.assert_close(
            backend.attend(q, cache, attn, OPTIONS).double(), expected(q, attn, kept), rtol=1e-5, atol=1e-5
        )
        before_q, before_k = q.clone(), k.clone()
        backend.rotate_and_write_kv(torch.arange(len(q)), q, k, v, table, cache, attn)
    turned = torch.complex(angles.cos(), angles.sin())[1 : len(q)]
    for before, after in ((before_q, q), (before_k, k)):
        pairs = torch.complex(*before[1:].chunk(2, dim=-1)) * turned[:, None]
        torch.testing.assert_close(after[1:], torch.cat([pairs.real, pairs.imag], dim=-1))


def test_trial_of_varlen():
    def trial(varlen_attn):
        return VarlenAttention(varlen_attn).trial(CPU, torch.bfloat16, 64, 16)

    def refuses(*args, **options):
        raise RuntimeError("block_table is not supported")

    def looks_ahead(query, key, value, *args, scale, **options):
        return stand_ins.varlen_attn(query, key.flip(1), value, *args, scale=scale, **options)

    assert trial(stand_ins.varlen_attn) is None
    assert trial(refuses) == "a trial call failed: block_table is not supported"
    assert trial(looks_ahead) == "a trial call gave wrong results"


def test_pages_that_flash_attention_reads(monkeypatch):
    assert varlen.unreadable_pages(512) is None
    assert "multiple of 256 tokens, and block_size is 16" in varlen.unreadable_pages(16)
    monkeypatch.setattr(varlen, "_active", lambda: "FA3")
    assert varlen.unreadable_pages(16) is None


def without_pages(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """varlen_attn of an older torch."""


@pytest.mark.parametrize(
    ("name", "arguments", "varlen_attn", "message"),
    [
        ("triton", (CUDA, torch.bfloat16, 64), None, "must be one of auto, paged, varlen, flashinfer, got 'triton'"),
        ("varlen", (CPU, torch.bfloat16, 64), None, "='varlen' cannot be used: it runs on CUDA only, .* is cpu"),
        ("flashinfer", (CPU, torch.bfloat16, 64), None, "='flashinfer' cannot be used: it runs on CUDA only"),
        ("varlen", (CUDA, torch.bfloat16, 64), None, "has no torch.nn.attention.varlen"),
        ("varlen", (CUDA, torch.bfloat16, 64), without_pages, "has no seqused_k, block_table, enable_gqa"),
        (
            "varlen",
            (CUDA, torch.float32, 64),
            stand_ins.varlen_attn,
            "takes bfloat16 and float16, and dtype is float32",
        ),
        ("varlen", (CUDA, torch.float16, 260), stand_ins.varlen_attn, "up to 256, and the model's head_dim is 260"),
        ("flashinfer", (CUDA, torch.float16, 64), None, "the package flashinfer is not installed"),
    ],
)
def test_a_backend_that_cannot_serve(monkeypatch, name, arguments, varlen_attn, message):
    monkeypatch.setattr(varlen, "find_varlen_attn", lambda: varlen_attn)
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"attention_backend.*{message}"):
        check_backend(name, *arguments)


def test_selection(monkeypatch):
    def select(name, device="cuda"):
        return select_backend(name, device, torch.bfloat16, 64, 256).name

    monkeypatch.setattr(varlen, "find_varlen_attn", lambda: stand_ins.varlen_attn)
    active: list[str] = []
    monkeypatch.setattr(
        attention, "current_flash_attention_impl", lambda: active[-1] if active else None, raising=False
    )
    monkeypatch.setattr(attention, "activate_flash_attention_impl", active.append, raising=False)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", active.clear, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen, "_is_installed", lambda module: module == "flash_attn_interface")
    monkeypatch.setattr(VarlenAttention, "trial", lambda *arguments: None)
    assert select("paged") == "paged" and not active
    assert [select("auto"), select("varlen")] == ["varlen", "varlen"] and active == ["FA3"]
    active.clear()
    assert [select("auto", "cpu"), select("paged", "cpu")] == ["paged", "paged"]
    monkeypatch.setattr(VarlenAttention, "trial", lambda *arguments: "a trial call failed: no such kernel")
    # A backend that does not work does not stay.
    assert select("auto") == "paged" and not active
    with pytest.raises(ValueError, match="attention_backend='varlen' cannot be used: a trial call failed: no such ker"):
        select("varlen")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_random_model("llama", "small", tmp_path_factory.mktemp("llama"))[0]


def test_an_engine_is_built_for_the_layout_of_its_backend(folder, monkeypatch):
    def generate():
        llm = LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, dtype="float32", enforce_eager=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(199, (3, 20, 33))]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0.0, detokenize=False), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    with force("reference"):
        ours = generate()
        backend = VarlenAttention(stand_ins.varlen_attn)
        monkeypatch.setattr(model_runner, "select_backend", lambda *arguments: backend)
        assert generate() == ours


@pytest.mark.parametrize("by_environment", [False, True])
def test_an_engine_refuses_at_the_door(folder, monkeypatch, by_environment):
    if by_environment:
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "varlen")
    name = "auto" if by_environment else "varlen"
    with pytest.raises(ValueError, match="attention_backend='varlen' cannot be used: it runs on CUDA only"):
        LLM(str(folder), skip_tokenizer_init=True, device="cpu", attention_backend=name)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "XFORMERS"])
def test_another_engines_backend_in_the_environment_is_a_warning(folder, monkeypatch, name):
    told = []
    monkeypatch.setattr("vllm.attention.select.warn_once", lambda logger, message, *parts: told.append(message % parts))
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", name)
    config = EngineArgs(str(folder), skip_tokenizer_init=True, device="cpu").create_engine_config()
    assert config.model_config.attention_backend == "auto"
    assert told == [f"VLLM_ATTENTION_BACKEND={name} is another engine's: taken as auto"]
