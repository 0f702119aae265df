"""vllm-canon's model, a Llama with short convolutions that keep states, unmodified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor

from vllm import LLM, SamplingParams

pytest.importorskip("vllm_canon")

WIDTH = 4


class Canon:
    """The model in PyTorch, of a checkpoint that it writes."""

    def __init__(self, folder: Path) -> None:
        make_tiny("llama", folder, tie_word_embeddings=False)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.theta = self.config["rope_parameters"]["rope_theta"]
        self.config |= {
            "architectures": ["LlamaCanonForCausalLM"],
            "model_type": "llama_canon",
            "canon_set": "ABCD",
            "canon_kernel": WIDTH,
            "canon_bias": False,
            "canon_activation": False,
            "canon_residual": True,
            "rope_theta": self.theta,
            "rope_scaling": None,
        }
        (folder / "config.json").write_text(json.dumps(self.config))
        self.tensors = load_file(folder / "model.safetensors")
        heads = self.config["num_attention_heads"] + 2 * self.config["num_key_value_heads"]
        hidden, inner = self.config["hidden_size"], self.config["intermediate_size"]
        widths = {"canonA": hidden, "canonC": hidden, "mlp.canonD": 2 * inner}
        widths["self_attn.canonB"] = heads * self.config["head_dim"]
        generator = torch.Generator().manual_seed(1)
        for layer in range(self.config["num_hidden_layers"]):
            for name, width in widths.items():
                values = torch.randn(width, 1, WIDTH, generator=generator) * 0.3
                self.tensors[f"model.layers.{layer}.{name}.weight"] = values
        save_file(self.tensors, folder / "model.safetensors")

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def logprobs(self, ids: list[int]) -> Tensor:
        x = self.tensors["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            x = self.block(x, f"model.layers.{layer}.")
        x = self.norm(x, self.tensors["model.norm.weight"])
        return (x @ self.tensors["lm_head.weight"].T).log_softmax(-1)

    def block(self, x: Tensor, prefix: str) -> Tensor:
        def weight(*names: str) -> Tensor:
            return torch.cat([self.tensors[f"{prefix}{name}.weight"] for name in names])

        width, num_keys = self.config["head_dim"], self.config["num_key_value_heads"]
        hidden = convolved(self.norm(x, weight("input_layernorm")), weight("canonA"))
        joined = hidden @ weight("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj").T
        heads = convolved(joined, weight("self_attn.canonB")).unflatten(-1, (-1, width)).transpose(0, 1)
        query, key, value = heads.split([len(heads) - 2 * num_keys, num_keys, num_keys])
        groups = len(query) // num_keys
        key, value = (each.repeat_interleave(groups, 0) for each in (self.rotated(key), value))
        attended = F.scaled_dot_product_attention(self.rotated(query), key, value, is_causal=True)
        x = x + attended.transpose(0, 1).flatten(1) @ weight("self_attn.o_proj").T
        hidden = convolved(self.norm(x, weight("post_attention_layernorm")), weight("canonC"))
        gate, up = convolved(hidden @ weight("mlp.gate_proj", "mlp.up_proj").T, weight("mlp.canonD")).chunk(2, -1)
        return x + (F.silu(gate) * up) @ weight("mlp.down_proj").T

    def rotated(self, heads: Tensor) -> Tensor:
        width = heads.shape[-1]
        angles = torch.arange(heads.shape[1])[:, None] / self.theta ** (torch.arange(0, width, 2) / width)
        first, second = heads.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    return x + F.conv1d(F.pad(x.T[None], (WIDTH - 1, 0)), weight, groups=x.shape[1])[0].T


def test_readings_equal_its_arithmetic(tmp_path):
    """With prompts in chunks, and a prefix whose states are kept."""
    canon = Canon(tmp_path / "model")
    llm = LLM(
        str(tmp_path / "model"), dtype="float32", max_model_len=96, max_num_batched_tokens=32, skip_tokenizer_init=True
    )
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1, logprob_token_ids=[5, 6])
    whole = list(range(3, 58))
    for prompts in ([whole, [7, 8, 9], [5]], [[*whole[:48], 90, 91], [7, 8, 9, 10]]):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        for ids, output in zip(prompts, outputs, strict=True):
            answer = output.outputs[0]
            expected = canon.logprobs(ids + list(answer.token_ids))
            for place, row in enumerate([*output.prompt_logprobs[1:], *answer.logprobs]):
                for token, reading in row.items():
                    assert reading.logprob == pytest.approx(expected[place, token].item(), abs=1e-4)
    assert outputs[0].num_cached_tokens == 48
