"""Small random checkpoints with prediction layers, and what these draft: by transformers' modules, from the start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES, fill_weights, make_architecture
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Family:
    """How a family stores `count` prediction layers.

    Attributes:
        architecture: the model's row.
        one_layer: what differs in a model of one layer that is a prediction layer's.
        names: of the projection, the norms of embedding and hidden state, the output norm ("": none), and of the
            decoder layer, for the layer's number from 0 on and from the model's last on.
        further: options of the model's config.json.
        renames: of the decoder layer's tensors.
    """

    architecture: str
    one_layer: dict[str, Any]
    names: tuple[str, str, str, str, str]
    count: int = 1
    hidden_first: bool = False
    passes_normed: bool = True
    further: dict[str, Any] | None = None
    renames: tuple[str, str] = ("", "")


_NEXT = tuple(f"model.layers.{{after}}.{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm", ""))
_QWEN = (
    "mtp.fc",
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.norm",
    "mtp.layers.{index}.",
)
_MIMO = tuple(
    f"model.mtp_layers.{{index}}.{part}"
    for part in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", "")
)
_ERNIE = (*(f"model.mtp_{part}.{{index}}" for part in ("linear_proj", "emb_norm", "hidden_norm")), "")
_ATTENDS = {"layer_types": ["full_attention"]}
FAMILIES = {
    "qwen3_next": Family("qwen3_next", _ATTENDS | {"mlp_only_layers": []}, _QWEN),
    "qwen3_5": Family("qwen3_5", _ATTENDS, _QWEN, further={"mtp_num_hidden_layers": 1}),
    "qwen3_5_moe": Family("qwen3_5_moe", _ATTENDS, _QWEN),
    "glm4_moe": Family("glm4_moe", {"first_k_dense_replace": 0}, _NEXT, passes_normed=False),
    "deepseek_v3": Family(
        "deepseek_v3",
        {"first_k_dense_replace": 0},
        _NEXT,
        2,
        passes_normed=False,
        further={"num_nextn_predict_layers": 2},
    ),
    "glm_moe_dsa": Family(
        "glm_moe_dsa", {"mlp_layer_types": ["sparse"], "indexer_types": ["full"]}, _NEXT, passes_normed=False
    ),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        tuple(f"model.mtp.layers.{{index}}.{part}" for part in ("eh_proj", "enorm", "hnorm", "final_layernorm", "")),
        2,
        renames=("post_attention_layernorm", "pre_mlp_layernorm"),
    ),
    "exaone_moe": Family("exaone_moe", _ATTENDS | {"mlp_layer_types": ["dense"]}, _QWEN),
    "mimo": Family(
        "qwen2",
        {"use_sliding_window": False, "layer_types": ["full_attention"]},
        _MIMO,
        3,
        hidden_first=True,
        further={"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True},
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe", {"moe_layer_start_index": 1}, (*_ERNIE, "model.mtp_block.{index}."), passes_normed=False
    ),
}


class Reference:
    """A checkpoint's model and its prediction layers by transformers' modules, in float32."""

    def __init__(self, name: str, folder: Path, is_near: bool = False, **overrides: Any) -> None:
        """Writes the checkpoint. `is_near`: such that many drafts are right: layers change little, so that a token
        follows from the one before it."""
        self.family = family = FAMILIES[name]
        own = {"use_sliding_window": False} if name == "mimo" else {}
        self.model = make_architecture(family.architecture, folder, **(own | overrides))
        if is_near:
            _weaken(self.model)
            self.model.save_pretrained(folder)
        num_layers = self.model.config.num_hidden_layers
        self.layers = [self._make_layer(index, folder / f"layer{index}", is_near) for index in range(family.count)]
        tensors = load_file(folder / "model.safetensors")
        for index, layer in enumerate(self.layers):
            places = [each.format(index=index, after=num_layers + index) for each in family.names]
            parts = zip(places, (layer.projection, layer.embedding_norm, layer.hidden_norm, layer.norm), strict=False)
            tensors |= {f"{place}.weight": part.weight.detach().clone() for place, part in parts if place}
            stored = load_file(folder / f"layer{index}" / "model.safetensors")
            prefix = "model.layers.0."
            for key, value in stored.items():
                if key.startswith(prefix):
                    tensors[places[4] + key.removeprefix(prefix).replace(*family.renames)] = value
            if family.names == _NEXT:
                tensors[places[4] + "embed_tokens.weight"] = self.model.get_input_embeddings().weight.detach().clone()
                tensors[places[4] + "shared_head.head.weight"] = self.model.lm_head.weight.detach().clone()
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / "model.safetensors")
        options = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(options | (family.further or {})))

    def _make_layer(self, index: int, folder: Path, is_near: bool) -> Any:
        family = self.family
        fields = {"num_hidden_layers": 1, "max_window_layers": 1} if family.architecture == "qwen2" else {}
        fields = fields or {"num_hidden_layers": 1}
        if "mlp_layer_types" in ARCHITECTURES[family.architecture][1]:
            fields["mlp_layer_types"] = ["sparse"]
        one = make_architecture(family.architecture, folder, seed=7 + index, **(fields | family.one_layer))
        size = self.model.config.hidden_size
        layer = nn.Module()
        layer.decoder, norm = one.model, one.model.norm
        one.model.norm = nn.Identity()
        layer.projection = nn.Linear(2 * size, size, bias=False)
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        for name in ("embedding_norm", "hidden_norm", "norm"):
            setattr(layer, name, type(norm)(size, eps=eps))
        fill_weights(layer.projection, 50 + index)
        for number, name in enumerate(("embedding_norm", "hidden_norm", "norm")):
            fill_weights(getattr(layer, name), 60 + 3 * index + number)
        if is_near:
            _weaken(one)
            one.save_pretrained(folder)
            self._point_to_embedding(layer)
        return layer

    @torch.no_grad()
    def _point_to_embedding(self, layer: Any) -> None:
        """The input is the embedding, and the output norm is the model's."""
        size = self.model.config.hidden_size
        parts = torch.eye(size), torch.zeros(size, size)
        layer.projection.weight.copy_(torch.cat(parts[::-1] if self.family.hidden_first else parts, dim=1))
        is_offset = "Next" in type(layer.norm).__name__ or "3_5" in type(layer.norm).__name__
        layer.embedding_norm.weight.fill_(0.0 if is_offset else 1.0)
        layer.norm.weight.copy_(self.model.model.norm.weight)

    @torch.no_grad()
    def _made(self, index: int, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """A layer's input."""
        layer = self.layers[index if self.family.names != _QWEN else 0]
        embedded = self.model.get_input_embeddings()(torch.tensor(tokens))
        parts = layer.embedding_norm(embedded), layer.hidden_norm(hidden)
        return layer.projection(torch.cat(parts[::-1] if self.family.hidden_first else parts, dim=-1))

    @torch.no_grad()
    def logits(self, text: Sequence[int], num_tokens: int) -> tuple[list[int], list[Tensor]]:
        """The draft of `num_tokens` after a text, and the logits, [V], of each of its tokens."""
        found, all_logits = list(text), []
        hidden = self.model.model(torch.tensor([list(text)[:-1]])).last_hidden_state[0]
        stream = hidden[:0]
        for step in range(num_tokens):
            index = min(step, len(self.layers) - 1)
            if step == index:
                stream = self._made(index, found[1 + index : len(text) + index], hidden)
            else:
                stream = torch.cat((stream, self._made(index, found[-1:], hidden[-1:])))
            out = self.layers[index].decoder(inputs_embeds=stream[None], use_cache=False).last_hidden_state[0]
            norm = self.layers[index if self.family.names != _QWEN else 0].norm
            has_norm = bool(self.family.names[3])
            normed = norm(out) if has_norm else out
            hidden = normed if self.family.passes_normed and has_norm else out
            all_logits.append(self.model.lm_head(normed[-1]))
            found.append(int(all_logits[-1].argmax()))
        return found[len(text) :], all_logits


@torch.no_grad()
def _weaken(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            parameter.mul_(0.02)
