"""The attention layer: options, other layers' keys and values, what each layer keeps of a token."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models_util import hf_logits, load_model, make_random_model, paged_logits, random_prompts
from torch import nn

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.communicator import ALONE
from vllm.layers.attention import Attention, AttentionOptions
from vllm.layers.kv_cache_spec import KVCacheSpec, kv_cache_layout, kv_cache_specs, layer_kinds

WINDOW = 6
# float32, as in test_models.py.
TOLERANCE = 1e-4


def test_window_equals_transformers(tmp_path):
    folder, hf_model = make_random_model("mistral", "small", tmp_path, sliding_window=WINDOW)
    model, config = load_model(folder)
    for module in model.modules():
        if isinstance(module, Attention):
            module.options = replace(module.options, window=WINDOW)
    prompts = random_prompts(config.vocab_size)
    assert max(map(len, prompts)) > 2 * WINDOW
    expected = hf_logits(hf_model, prompts)
    for chunk in (1, 7, None):
        for got, want in zip(paged_logits(model, config, prompts, chunk), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def one_request(tokens, heads=2, head_dim=16):
    """A step of one whole prompt, and a cache for it."""
    torch.manual_seed(0)
    layer = Attention(head_dim)
    shape = layer.backend.kv_cache_shape(1, 16, heads, head_dim)
    cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    attn = AttentionMetadata(
        torch.arange(tokens), torch.zeros(1, 1, dtype=torch.int32), starts, starts[1:], tokens, tokens
    )
    return *torch.randn(3, tokens, heads, head_dim), cache, attn


def test_a_layer_reads_another_ones_keys_and_values():
    q, k, v, cache, attn = one_request(9)
    expected = Attention(16)(q, k, v, cache, attn)
    before = [each.clone() for each in cache]
    got = Attention(16, kv_sharing_target=0)(q, None, None, cache, attn)
    assert torch.equal(got, expected)
    for each, old in zip(cache, before, strict=True):
        assert torch.equal(each.nan_to_num(), old.nan_to_num())


def test_only_queries_are_rotated_where_keys_are_another_layers():
    class Rotary:
        cos_sin_cache = torch.cat([(angles := torch.rand(9, 8)).cos(), angles.sin()], dim=1)

    q, k, v, cache, attn = one_request(9)
    turned, positions = q.clone(), torch.arange(9)
    expected = Attention(16, rotary=Rotary())(turned, k, v, cache, attn, positions=positions)
    got = Attention(16, rotary=Rotary(), kv_sharing_target=0)(q, None, None, cache, attn, positions=positions)
    assert torch.equal(got, expected) and torch.equal(q, turned)


class Config:
    num_key_value_heads, head_dim, num_hidden_layers = 4, 16, 3


def test_specs_follow_the_layers():
    layers = nn.ModuleList(
        [
            Attention(16, options=AttentionOptions(window=8)),
            Attention(32, num_kv_heads=1),
            Attention(16, kv_sharing_target=0),
        ]
    )
    windowed = KVCacheSpec(4, 16, 8)
    assert kv_cache_specs(layers, Config, ALONE) == [windowed, KVCacheSpec(1, 32), windowed._replace(shared_with=0)]
    assert kv_cache_specs(nn.Linear(1, 1), Config, ALONE) == [KVCacheSpec(4, 16)] * 3


def test_a_rank_has_its_part_of_the_query_heads_whatever_its_key_heads():
    class Grouped(Config):
        num_attention_heads, num_key_value_heads = 8, 2

    layers = nn.ModuleList([Attention(16), Attention(32, num_kv_heads=1)])
    for ranks, kv_heads in ((1, 2), (2, 1), (4, 1), (8, 1)):
        group = SimpleNamespace(world_size=ranks, rank=ranks - 1)
        found = [(kind.num_heads, kind.num_kv_heads) for kind in layer_kinds(layers, Grouped, group)]
        assert found == [(8 // ranks, kv_heads), (8 // ranks, 1)]


@pytest.mark.parametrize("target", [-1, 2, 3, 1])
def test_only_an_earlier_layers_own_keys_can_be_shared(target):
    layers = nn.ModuleList([Attention(16), Attention(16, kv_sharing_target=0), Attention(16, kv_sharing_target=target)])
    with pytest.raises(ValueError, match="kv_sharing_target of layer 2 must be an earlier layer"):
        kv_cache_specs(layers, Config, ALONE)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"window": 0}, "window must be at least 1 token or None, got 0"),
        ({"softcap": 0.0}, "softcap must be positive or None, got 0.0"),
        ({"scale": -1.0}, "scale must be positive or None, got -1.0"),
        ({"sinks": torch.zeros(4, dtype=torch.bfloat16)}, "sinks must be float32 of shape"),
        ({"alibi_slopes": torch.zeros(4, 1)}, "alibi_slopes must be float32 of shape"),
    ],
    ids=str,
)
def test_bad_options(bad, message):
    with pytest.raises(ValueError, match=message):
        AttentionOptions(**bad)


GEMMA_27B = [KVCacheSpec(16, 128, None if layer % 6 == 5 else 1024) for layer in range(62)]
GPT_OSS_120B = [KVCacheSpec(8, 64, None if layer % 2 else 128) for layer in range(36)]


@pytest.mark.parametrize(
    ("specs", "windows", "num_caches"),
    [
        (GEMMA_27B, (None, *[1024] * 6), 10),
        (GPT_OSS_120B, (None, 128), 18),
        ([KVCacheSpec(4, 16)] * 3, (None,), 3),
        ([KVCacheSpec(4, 16, 8)] * 3, (8,), 3),
        # A window that no sequence exceeds is none.
        ([KVCacheSpec(4, 16, 4096), KVCacheSpec(4, 16)], (None,), 2),
    ],
    ids=["gemma", "gpt-oss", "one kind", "windows alone", "long window"],
)
def test_layers_of_a_window_form_groups_that_share_memory(specs, windows, num_caches):
    layout = kv_cache_layout(specs, max_model_len=4096)
    assert layout.windows == windows and len(layout.caches) == num_caches
    # Within a group each layer has a cache of its own.
    places = list(zip(layout.group_of_layer, layout.cache_of_layer, strict=True))
    assert len(set(places)) == len(specs)
    for layer, spec in enumerate(specs):
        assert windows[layout.group_of_layer[layer]] == (None if spec.window == 4096 else spec.window)


def test_layers_of_other_shapes_have_caches_of_their_own():
    specs = [KVCacheSpec(4, 16, 8), KVCacheSpec(1, 32), KVCacheSpec(4, 16, 8, shared_with=0), KVCacheSpec(4, 16, 8)]
    layout = kv_cache_layout(specs, max_model_len=100)
    assert layout.windows == (None, 8)
    assert layout.group_of_layer == [1, 0, 1, 1]
    assert [layout.caches[index][:2] for index in layout.cache_of_layer] == [(4, 16), (1, 32), (4, 16), (4, 16)]
    assert layout.cache_of_layer[2] == layout.cache_of_layer[0] != layout.cache_of_layer[3]
