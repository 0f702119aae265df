"""Which layers of a checkpoint predict the tokens after the next one, and what their tensors are called.

Such a layer (DeepSeek V3, arXiv:2412.19437, section 2.2) takes a token's final hidden state and the embedding of the
token that follows, each normalised, side by side through a projection; then comes a decoder layer, and the model's head
gives the logits of the token after that one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Part = Literal["layers", "combiners", "norms"]


@dataclass(frozen=True)
class PredictionLayers:
    """A family's.

    Attributes:
        prefix: regular expression of what the names of their tensors begin with; the group `index` is the layer's
            number, and is not there for what all layers share; the group `part`, if there is one, belongs to what
            follows.
        embedding_norm, hidden_norm, projection: names of the parts that make a layer's input.
        output_norm: name of the norm before the head; None: there is none.
        shared: names of the model's own parts that are stored here once more.
        block: what names of the decoder layer's tensors begin with.
        hidden_first: the hidden state comes before the embedding.
        passes_normed: a further layer takes the output norm's result, else what comes before it.
        follows_model: layers are numbered from the model's last on.
        is_dense: they have the model's MLP, not its mixture.
        share_parts: all have the same projection and norms.
        have_windows: they have the attention of the model's layers with windows.
        post_norm: name of the norm before the MLP, where it is not the model's.
    """

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    output_norm: str | None
    shared: tuple[str, ...] = ()
    block: str = ""
    hidden_first: bool = False
    passes_normed: bool = True
    follows_model: bool = False
    is_dense: bool = False
    share_parts: bool = False
    have_windows: bool = False
    post_norm: str | None = None

    def place(self, name: str, num_model_layers: int) -> tuple[Part, int, str] | None:
        """Where a checkpoint's tensor belongs: the kind of part, the layer's number from 0 on, and the rest of the
        name; None: it is none of these layers'."""
        found = re.match(self.prefix, name)
        if found is None:
            return None
        groups = found.groupdict()
        index = int(groups["index"] or 0) - (num_model_layers if self.follows_model else 0)
        rest = (groups.get("part") or "") + name[found.end() :]
        if index < 0 or any(rest.startswith(f"{part}.") for part in self.shared):
            return None
        for part in ("embedding_norm", "hidden_norm", "projection"):
            own = getattr(self, part)
            if rest.startswith(f"{own}."):
                return "combiners", index, part + rest.removeprefix(own)
        if self.output_norm is not None and rest.startswith(f"{self.output_norm}."):
            return "norms", index, rest.removeprefix(f"{self.output_norm}.")
        if not rest.startswith(self.block):
            return None
        rest = rest.removeprefix(self.block)
        if self.post_norm is not None and rest.startswith(f"{self.post_norm}."):
            rest = "post_attention_layernorm" + rest.removeprefix(self.post_norm)
        return "layers", index, rest

    def count(self, names: Iterable[str], num_model_layers: int) -> int:
        """How many layers there are among a checkpoint's tensors."""
        places = (self.place(name, num_model_layers) for name in names)
        return 1 + max((place[1] for place in places if place is not None and place[0] == "layers"), default=-1)


DEEPSEEK = PredictionLayers(
    r"model\.layers\.(?P<index>\d+)\.",
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    shared=("shared_head.head", "embed_tokens"),
    passes_normed=False,
    follows_model=True,
)
"""DeepSeek V3, GLM from 4.5 on."""

QWEN = PredictionLayers(
    r"mtp\.(layers\.(?P<index>\d+)\.)?", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", share_parts=True
)
"""Qwen3-Next, Qwen3.5."""

EXAONE = replace(QWEN, is_dense=True)
"""K-EXAONE."""

MIMO = PredictionLayers(
    r"model\.mtp_layers\.(?P<index>\d+)\.",
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    hidden_first=True,
)
"""MiMo."""

MIMO_V2 = PredictionLayers(
    r"model\.mtp\.layers\.(?P<index>\d+)\.",
    "enorm",
    "hnorm",
    "eh_proj",
    "final_layernorm",
    is_dense=True,
    have_windows=True,
    post_norm="pre_mlp_layernorm",
)
"""MiMo V2 Flash."""

ERNIE = PredictionLayers(
    r"model\.(?P<part>mtp_\w+\.)(?P<index>\d+)\.",
    "mtp_emb_norm",
    "mtp_hidden_norm",
    "mtp_linear_proj",
    None,
    block="mtp_block.",
    is_dense=True,
)
"""ERNIE 4.5."""
