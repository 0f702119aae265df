"""Models over several ranks: the same results as on one, and each rank holds its share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models_util import ARCHITECTURES, make_random_model, random_prompts
from thread_ranks import make_thread_llm
from tiny_llm import make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.config.checkpoint.config import load_hf_config
from vllm.distributed.communicator import Communicator, split_kv_heads, split_vocab
from vllm.distributed.parallel_state import tensor_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.loader.weights import checkpoint_slots, load_weights
from vllm.models.dense.llama import LlamaForCausalLM
from vllm.models.dense.qwen import Qwen2ForCausalLM

VOCAB_SIZE = 199  # no rank count but 1 divides it
PARAMS = SamplingParams(max_tokens=6, temperature=0, logprobs=5, prompt_logprobs=3, ignore_eos=True, detokenize=False)


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def rank_of(rank: int, world_size: int) -> Communicator:
    """A group for building a model, which needs no collective."""
    group = Communicator()
    group.rank, group.world_size = rank, world_size
    return group


def assert_same(ours, expected, tolerance: float = 1e-4) -> None:
    """Tokens and ranks equal, logprobs near: float32 sums in another order differ by less than 1e-5 here."""
    for own, other in zip(ours, expected, strict=True):
        assert own.outputs[0].token_ids == other.outputs[0].token_ids
        for mine, theirs in zip(own.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert_same_position(mine, theirs, tolerance)
        for mine, theirs in zip(own.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert (mine is None) == (theirs is None)
            assert_same_position(mine or {}, theirs or {}, tolerance)


def assert_same_position(mine, theirs, tolerance: float) -> None:
    assert {id_: entry.rank for id_, entry in mine.items()} == {id_: entry.rank for id_, entry in theirs.items()}
    for id_, entry in mine.items():
        assert abs(entry.logprob - theirs[id_].logprob) < tolerance


@pytest.mark.parametrize(
    ("arch", "size", "world_size"),
    [*((arch, "small", 2) for arch in ARCHITECTURES), ("qwen3", "small", 4), ("llama", "odd", 3), ("opt", "odd", 2)],
)
def test_ranks_together_compute_what_one_does(arch, size, world_size, tmp_path):
    overrides = {} if (arch, size) != ("llama", "odd") else {"intermediate_size": 99}
    folder, _ = make_random_model(arch, size, tmp_path, **overrides)
    fields = {"skip_tokenizer_init": True, "max_num_batched_tokens": 24}
    alone, together = make_tiny_llm(folder, **fields), make_thread_llm(folder, world_size, **fields)
    prompts = random_prompts(alone.llm_engine.model_config.vocab_size)
    assert_same(run(together, prompts), run(alone, prompts))
    executor = together.llm_engine.engine_core.executor
    for output in executor.outputs:
        np.testing.assert_array_equal(output.sampled_token_ids, executor.outputs[0].sampled_token_ids)
    executor.shutdown()


def test_prefix_cache_and_a_second_round_change_nothing(tmp_path):
    folder, _ = make_random_model("llama", "small", tmp_path)
    together = make_thread_llm(folder, 2, skip_tokenizer_init=True)
    prompts = random_prompts(VOCAB_SIZE, (40, 33))
    assert_same(run(together, prompts), run(together, prompts), tolerance=1e-6)
    together.llm_engine.engine_core.executor.shutdown()


def test_int8_weights_are_packed_by_each_rank(tmp_path):
    folder, _ = make_random_model("qwen2", "small", tmp_path)
    fields = {"skip_tokenizer_init": True, "quantization": "int8"}
    alone, together = make_tiny_llm(folder, **fields), make_thread_llm(folder, 2, **fields)
    prompts = random_prompts(VOCAB_SIZE)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, detokenize=False)
    for own, other in zip(run(together, prompts, params), run(alone, prompts, params), strict=True):
        mine, theirs = own.outputs[0].logprobs[0], other.outputs[0].logprobs[0]
        # A row-parallel layer's input is rounded to 8 bits by a scale of its rank's part, not of the whole row.
        assert max(abs(mine[id_].logprob - theirs[id_].logprob) for id_ in range(VOCAB_SIZE)) < 0.1
    together.llm_engine.engine_core.executor.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_loads_its_share_alone(rank, tmp_path):
    folder, source = make_random_model("qwen2", "small", tmp_path, tie_word_embeddings=False)
    whole = source.state_dict()
    with tensor_parallel(rank_of(rank, 2)):
        model = Qwen2ForCausalLM(load_hf_config(folder), max_model_len=64)
    load_weights(model, folder)
    held = {name: slot.target for name, slot in checkpoint_slots(model).items()}
    assert held.keys() == whole.keys()

    layer = "model.layers.1."
    vocab = split_vocab(VOCAB_SIZE, 2)[rank]
    by_rows = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.bias", "mlp.up_proj.weight"]
    for name in (layer + part for part in by_rows):
        assert_equal(held[name], whole[name].chunk(2)[rank])
    for name in (layer + "self_attn.o_proj.weight", layer + "mlp.down_proj.weight"):
        assert_equal(held[name], whole[name].chunk(2, dim=1)[rank])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert_equal(held[name], whole[name][vocab.start : vocab.stop])
    assert_equal(held[layer + "input_layernorm.weight"], whole[layer + "input_layernorm.weight"])
    assert model.lm_head.vocab_range == vocab


def test_ranks_share_key_value_heads_when_there_are_too_few(tmp_path):
    folder, source = make_random_model("llama", "small", tmp_path)  # 4 query heads, 2 key/value heads of 16
    keys = source.state_dict()["model.layers.0.self_attn.k_proj.weight"]
    for rank in range(4):
        with tensor_parallel(rank_of(rank, 4)):
            model = LlamaForCausalLM(load_hf_config(folder), max_model_len=64)
        load_weights(model, folder)
        assert model.model.layers[0].self_attn.qkv_proj.head_counts == [1, 1, 1]
        held = checkpoint_slots(model)["model.layers.0.self_attn.k_proj.weight"].target
        assert_equal(held, keys.chunk(2)[rank // 2])


@pytest.mark.parametrize(("num_kv_heads", "world_size"), [(8, 1), (8, 2), (8, 8), (2, 4), (1, 3)])
def test_query_heads_find_their_key_value_heads(num_kv_heads, world_size):
    num_heads = num_kv_heads * world_size
    group_size = num_heads // num_kv_heads
    for rank, held in enumerate(split_kv_heads(num_kv_heads, world_size)):
        own = range(rank * num_heads // world_size, (rank + 1) * num_heads // world_size)
        assert {head // group_size for head in own} == set(held)


@pytest.mark.parametrize(
    ("arch", "world_size", "message"),
    [
        ("llama", 3, "tensor_parallel_size=3 does not fit the model's num_attention_heads=4"),
        ("llama", 64, "tensor_parallel_size=64 does not fit the model's num_attention_heads=4"),
        ("qwen3", 4, "tensor_parallel_size=4 does not fit the model's num_key_value_heads=3"),
        ("opt", 6, "tensor_parallel_size=6 does not fit the model's intermediate_size=100"),
        ("opt", 0, "tensor_parallel_size must be an integer of at least 1, got 0"),
        ("opt", 2.0, "tensor_parallel_size must be an integer of at least 1, got 2.0"),
    ],
)
def test_a_size_that_does_not_divide_is_named(arch, world_size, message, tmp_path):
    size = "odd" if arch == "opt" else "small"
    overrides = {"num_attention_heads": 12, "num_key_value_heads": 3} if arch == "qwen3" else {}
    folder, _ = make_random_model(arch, size, tmp_path, **overrides)
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ValueError, match=message):
        EngineArgs(str(folder), tensor_parallel_size=world_size, dtype="float32").create_engine_config()


def test_one_device_has_one_rank(tmp_path):
    folder, _ = make_random_model("llama", "small", tmp_path)
    args = EngineArgs(str(folder), tensor_parallel_size=2, distributed_executor_backend="uni")
    with pytest.raises(ValueError, match="distributed_executor_backend='uni' .* tensor_parallel_size is 2"):
        args.create_engine_config()


def test_an_order_that_gloo_does_not_keep_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    folder, _ = make_random_model("llama", "small", tmp_path)
    fields = {"dtype": "float32", "device": "cpu", "disable_custom_all_reduce": True}
    EngineArgs(str(folder), tensor_parallel_size=2, **fields).create_engine_config()
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT=1 rules out disable_custom_all_reduce"):
        EngineArgs(str(folder), tensor_parallel_size=4, **fields).create_engine_config()


def assert_equal(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
