"""A decoder as data: its config.json says which; `decoder.py` builds it. A layer has what mixes tokens
(`attention.py`) and what follows (`mlp.py`): another kind of either is a class of specs here, a module beside these and
a line where DecoderLayer builds its parts. Kinds of states are in `states/specs.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from vllm.config.checkpoint.config import RopeConfig
from vllm.ops.choose_experts import ExpertChoice


@dataclass(frozen=True)
class NormSpec:
    """A normalisation over the last dimension.

    Attributes:
        kind: "rms", x / rms(x), or "layer", (x - mean) / std.
        weight, bias: whether it scales and shifts.
        offset: what is added to the checkpoint's weight.
    """

    kind: Literal["rms", "layer"]
    eps: float
    weight: bool = True
    bias: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class RotarySpec:
    """Rotary positions of a head's first `dim` values; `interleaved`: neighbours rotate together, else values half of
    `dim` apart."""

    dim: int
    rope: RopeConfig
    interleaved: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention of one layer.

    Attributes:
        rotary: None = no rotary positions.
        scale: factor on the scores; None = head_dim ** -0.5.
        window: a token attends to the last `window` positions, its own included; None = all.
        chunk: a token attends to those from the last multiple of `chunk` on; None = all.
        softcap: c of c * tanh(score / c); None = none.
        alibi_slopes: by head, the slope of ALiBi's bias slope * (key position - query position).
        sinks: whether each head has a learned logit that joins the softmax's denominator only.
        qk_norm: normalisation of queries and keys: of each head with one weight for all ("head"), of each head with a
            weight of its own ("heads"; "norms": LayerNorms that are tensors of their own in the checkpoint), or over
            the whole width ("width").
        qk_norm_after_rotary: the norm follows the rotation.
        clip: queries, keys and values are clamped to [-clip, clip], before queries and keys are normalised unless
            `clip_after_norm`.
        output_norm: normalisation of the heads' outputs before the output projection.
        output_gate: the heads' outputs are multiplied by this function of a further projection of the input, with an
            output for each of their values, or one a head: `gate_per_head`.
        query_growth: (beta, length): queries are scaled by 1 + beta * log(1 + floor((position + growth_start) /
            length)).
        v_norm: normalisation of each head's values.
        value_scale: factor on the values, which the family's checkpoint names put into their projection.
        value_is_key: the values are the keys' projection, before the keys' norm and rotation.
        kv_source: the earlier layer whose keys and values are read, in place of own ones.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    rotary: RotarySpec | None = None
    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    sinks: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "heads", "norms", "width"] = "head"
    qk_norm_after_rotary: bool = False
    clip: float | None = None
    clip_after_norm: bool = False
    output_norm: NormSpec | None = None
    output_gate: Literal["sigmoid", "softplus"] | None = None
    gate_per_head: bool = False
    query_growth: tuple[float, float] | None = None
    growth_start: int = 0
    v_norm: NormSpec | None = None
    value_scale: float = 1.0
    value_is_key: bool = False
    kv_source: int | None = None


@dataclass(frozen=True, kw_only=True)
class HeadMixtureSpec(AttentionSpec):
    """A mixture of attention heads (arXiv:2210.05144): each of `num_experts` has a query for every key head and an
    output projection, and a token takes those of the experts that `choice` gives by a router's logits, whose results
    are weighed. num_heads are those that a token takes: num_kv_heads of each chosen expert."""

    num_experts: int
    choice: ExpertChoice


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Self-attention whose keys and values are widened from a latent that the heads share (DeepSeek V2,
    arXiv:2405.04434, section 2.1): queries and keys have `nope_dim` values from it and `rope_dim` rotated ones, which
    of keys all heads have in common.

    Attributes:
        value_dim: of each head's values.
        latent_dim: of the latent that keys and values are made of.
        query_dim: of the latent that queries are made of; None = queries come from the hidden states.
        rotary: of the rotated values, all `rope_dim` of them; None = they are not rotated.
        scale: factor on the scores.
        norm: normalisation of both latents.
        query_scale, latent_scale: factors on queries, and on the latent that keys and values are made of.
        output_gate: each head's output is multiplied by the sigmoid of a further projection of the input.
        bias: of what makes the latents, and of the output projection.
        query_growth: as in AttentionSpec.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    query_dim: int | None
    rotary: RotarySpec | None
    scale: float
    norm: NormSpec
    bias: bool = False
    query_growth: tuple[float, float] | None = None
    growth_start: int = 0
    output_gate: bool = False
    query_scale: float = 1.0
    latent_scale: float = 1.0

    @property
    def head_dim(self) -> int:
        """The width of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values, once they are widened."""
        return self.num_heads


AnyAttention = AttentionSpec | LatentAttentionSpec


def rotating_in_windows(layers: Iterable[AttentionSpec]) -> tuple[AttentionSpec, ...]:
    """The layers, of which those without a window have no rotary positions."""
    return tuple(layer if layer.window else replace(layer, rotary=None) for layer in layers)


@dataclass(frozen=True)
class StateSpec:
    """A layer that mixes tokens through a recurrent state in place of attention; each kind derives from it.

    Attributes:
        split_by: name of the attribute that is `split_size`.
    """

    split_by: ClassVar[str] = "heads"

    @property
    def split_size(self) -> int:
        """The number of ranks has to divide this."""
        return int(getattr(self, self.split_by))


@dataclass(frozen=True)
class BesideSpec:
    """Attention and a state that take the same input; their results are added."""

    attention: AttentionSpec
    state: StateSpec

    @property
    def split_size(self) -> int:
        """The number of ranks has to divide this."""
        return self.state.split_size


AnyMixer = AnyAttention | StateSpec | BesideSpec


def attentions_of(layers: Iterable[AnyMixer | None]) -> tuple[AnyAttention, ...]:
    """The parts that have keys and values, in order."""
    own = (layer.attention if isinstance(layer, BesideSpec) else layer for layer in layers)
    return tuple(layer for layer in own if isinstance(layer, AttentionSpec | LatentAttentionSpec))


@dataclass(frozen=True)
class MlpSpec:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) when not `gated`; `inner_norm` comes before down. `sparsity`: of
    a token's gates, taken as normally distributed, about this share becomes 0: those below a bound that is subtracted
    from the others."""

    intermediate_size: int
    activation: str
    gated: bool = True
    up_bias: bool = False
    down_bias: bool = False
    inner_norm: NormSpec | None = None
    sparsity: float = 0.0

    @property
    def split_size(self) -> int:
        """The number of ranks has to divide this."""
        return self.intermediate_size


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts, each an MLP down(act(gate(x)) * up(x)), or down(act(up(x))) where they are not `gated`: the
    sum of some experts' results, which a router chooses by a product of x and weighs, plus `shared`'s, if there is one.

    Attributes:
        num_experts: E.
        expert_size: width of an expert.
        activation: act.
        clamp: (a, l) for gpt-oss's gate in place of it: g * sigmoid(a g) * (min(max(up, -l), l) + 1), g = min(gate, l).
        choice: how a token's experts follow from the router's logits.
        router_bias: whether the router's product has a bias.
        correction: whether each expert has a number that is added where experts are compared.
        router_is_float32: the router's weight stays float32, and so does its product.
        expert_bias: whether the experts' products have biases.
        alternates: an expert's gates and what they are multiplied with alternate among its first product's outputs,
            whose halves the checkpoint has as gate_proj and up_proj.
        weighs_inputs: an expert takes x times its weight; else its result is multiplied.
        shared: an MLP that every token takes.
        shared_gate: its result is multiplied by the sigmoid of a product of x.
        sum_scale: factor on the sum of all.
        correction_may_lack: a checkpoint may have none, which is one of zeros.
        output_norm: normalisation of the sum of all.
        output_bias: whether the sum of all has a bias.
        num_identities: further experts that the router chooses among: what they give is x.
        branch_norm: the experts take the residual stream by a norm of their own, while `shared` takes the block's, and
            the result of either is normalised before the two are added. The router takes the stream normalised by a
            weight of its own, and each expert has a number that its weights are multiplied by.
        gated: as in MlpSpec.
    """

    num_experts: int
    expert_size: int
    choice: ExpertChoice
    activation: str = "silu"
    clamp: tuple[float, float] | None = None
    router_bias: bool = False
    correction: bool = False
    router_is_float32: bool = False
    expert_bias: bool = False
    alternates: bool = False
    weighs_inputs: bool = False
    shared: MlpSpec | None = None
    shared_gate: bool = False
    sum_scale: float = 1.0
    correction_may_lack: bool = False
    output_norm: NormSpec | None = None
    output_bias: bool = False
    num_identities: int = 0
    branch_norm: NormSpec | None = None
    gated: bool = True

    @property
    def split_size(self) -> int:
        """The number of ranks has to divide this, beside the number of experts; 0: nothing."""
        return 0 if self.shared is None else self.shared.intermediate_size


@dataclass(frozen=True)
class PerLayerInputSpec:
    """A second embedding, of `size` values for each layer: each token's joins the residual stream at the layers' ends,
    gated by the stream's own projection through `activation`."""

    size: int
    vocab_size: int
    activation: str


@dataclass(frozen=True)
class PositionSpec:
    """Positions added to the embeddings: a learned table of `num_rows` rows, or sinusoids; row p + offset belongs to
    position p."""

    kind: Literal["learned", "sinusoidal"]
    num_rows: int
    offset: int = 0


Block = Literal["pre", "post", "output", "both", "parallel", "parallel_two"]


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder.

    Attributes:
        max_positions: tokens of context that the model was made for.
        layers, mlps: what mixes tokens in each layer, and its MLP or mixture; None: the layer has none.
        norm: the blocks' norms.
        block: where they stand. "pre": before attention and MLP. "output": after each, before it is added to the
            residual stream. "both": before and after each. "post": on the stream, after each was added. "parallel":
            attention and MLP take the same norm's result; "parallel_two": each has a norm of the stream.
        blocks: of each layer, where they differ.
        final_norm: None = none.
        embedding_size: width of the embeddings, projected to and from hidden_size where it differs.
        embedding_scale, residual_scale, logits_scale: factors on embeddings, on what a block adds to the residual
            stream, and on logits.
        scales_given: embeddings that a caller gives are multiplied by `embedding_scale`, too, as in transformers.
        logits_softcap: c of c * tanh(logit / c).
        residual_of_norm: what attention and MLP give is added to what they take, the norm's result.
        stream_scales: by layer, with `residual_of_norm`: factors on what attention's and the MLP's results are added
            to.
        per_layer_input: None = none.
        layer_scale: each block's result is multiplied by a number that the checkpoint has.
    """

    vocab_size: int
    hidden_size: int
    max_positions: int
    layers: tuple[AnyMixer | None, ...]
    mlps: tuple[MlpSpec | MoeSpec | None, ...]
    norm: NormSpec
    final_norm: NormSpec | None
    block: Block = "pre"
    blocks: tuple[Block, ...] | None = None
    tie_word_embeddings: bool = False
    embedding_size: int | None = None
    embedding_scale: float = 1.0
    scales_given: bool = False
    embedding_norm: NormSpec | None = None
    positions: PositionSpec | None = None
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    head_bias: bool = False
    per_layer_input: PerLayerInputSpec | None = None
    layer_scale: bool = False
    residual_of_norm: bool = False
    stream_scales: tuple[tuple[float, float], ...] | None = None

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The layers that are attention, but not latent."""
        return tuple(layer for layer in self.cached if isinstance(layer, AttentionSpec))

    @property
    def cached(self) -> tuple[AnyAttention, ...]:
        """The parts of `layers` that have keys and values."""
        return attentions_of(self.layers)
