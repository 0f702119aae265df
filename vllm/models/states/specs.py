"""Kinds of recurrent states, as data; the module of each is beside this."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from vllm.models.spec import NormSpec, StateSpec


@dataclass(frozen=True)
class ShortConvSpec(StateSpec):
    """out(c * conv(b * x)) of the projections b, c and x of the input, where conv is causal and by channel, over the
    last `kernel_size` tokens (LFM2, arXiv:2511.23404, section 2.1).

    Attributes:
        size: channels.
        bias: of the convolution and both projections.
    """

    split_by: ClassVar[str] = "size"

    size: int
    kernel_size: int
    bias: bool = False


@dataclass(frozen=True)
class DeltaRuleSpec(StateSpec):
    """Linear attention by the gated delta rule (arXiv:2412.06464): projections to queries, keys and values go through a
    convolution by channel and SiLU, and what is read is normalised by head and gated by SiLU of a further projection.

    Attributes:
        key_heads: of queries and keys, each of which serves heads / key_heads heads of values.
        key_dim, value_dim: of a head.
        kernel_size: of the convolution.
        norm_eps: of the norm.
        beta_scale: factor on how much is written.
    """

    split_by: ClassVar[str] = "key_heads"

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    norm_eps: float
    beta_scale: float = 1.0


@dataclass(frozen=True)
class ChannelDeltaSpec(StateSpec):
    """Linear attention by the delta rule of which each key's channel decays by itself (Kimi Linear, arXiv:2510.26692):
    as DeltaRuleSpec, but that gates are by sigmoids.

    Attributes:
        heads, head_dim: of queries, keys and values alike.
        kernel_size: of the convolution.
        norm_eps: of the norm.
        low_rank: decays and gates are projected through head_dim values.
        bound: what decays' logarithms are above, by a sigmoid; 0: nothing, and they follow from a softplus.
    """

    heads: int
    head_dim: int
    kernel_size: int
    norm_eps: float
    low_rank: bool = True
    bound: float = 0.0


@dataclass(frozen=True)
class Mamba2Spec(StateSpec):
    """The state space of Mamba 2 (arXiv:2405.21060): a convolution by channel and SiLU of inputs x, B and C, and what
    is read is gated by SiLU of a further projection.

    Attributes:
        head_dim, state_dim: P and N, of the matrix that a head keeps.
        groups: of B and C, each of which serves heads / groups heads.
        kernel_size: of the convolution.
        norm_groups: what is read is normalised in so many parts; 0: not at all.
        norm_eps: of that norm.
        gate_first: the gate comes before the norm.
        conv_bias, in_bias, out_bias: of the convolution and the projections.
        dt_limits: the least and the greatest step.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    kernel_size: int
    norm_groups: int
    norm_eps: float
    gate_first: bool = True
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    dt_limits: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True)
class MambaSpec(StateSpec):
    """The selective scan of Mamba (arXiv:2312.00752), gated by SiLU of a further projection: steps, B and C are
    projected from what a convolution by channel and SiLU give, steps through `step_rank` values.

    Attributes:
        channels: of the scan.
        state_dim: values that a channel keeps.
        kernel_size: of the convolution.
        norm: of the values that steps are made of, B and C; None: none.
        conv_bias, bias: of the convolution, and of the first and the last projection.
        heads: of channels, each of which has steps, B and C of its own.
    """

    channels: int
    state_dim: int
    step_rank: int
    kernel_size: int
    norm: NormSpec | None = None
    conv_bias: bool = True
    bias: bool = False
    heads: int = 1

    @property
    def split_size(self) -> int:
        return self.channels if self.heads == 1 else self.heads


@dataclass(frozen=True)
class LightningSpec(StateSpec):
    """Linear attention whose memory decays at a constant rate (arXiv:2501.08313, section 2.2): projections to queries,
    keys and values go through SiLU, and what is read is normalised as a whole and gated by a sigmoid.

    Attributes:
        rates: of each head: its memory keeps e^-rate from token to token.
        head_dim: of queries, keys and values alike.
        norm_eps: of the norm.
    """

    rates: tuple[float, ...]
    head_dim: int
    norm_eps: float

    @property
    def split_size(self) -> int:
        return len(self.rates)


@dataclass(frozen=True)
class RgLruSpec(StateSpec):
    """Griffin's recurrent block (arXiv:2402.19427, section 2.3): a convolution by channel and the real-gated linear
    recurrent unit of one projection, times the activation of another one.

    Attributes:
        heads, width: of the channels, whose gates are products within a head.
        kernel_size: of the convolution.
        activation: of the other projection.
    """

    heads: int
    width: int
    kernel_size: int
    activation: str


@dataclass(frozen=True)
class WkvSpec(StateSpec):
    """RWKV 4's time mixing (arXiv:2305.13048, section 3.1): keys, values and gates are products of a token's input and
    the one before, each mixed in its own way, and what is read is a mean of values whose weights decay.

    Attributes:
        channels: of keys, values and gates.
    """

    split_by: ClassVar[str] = "channels"

    channels: int


@dataclass(frozen=True)
class ChannelMixSpec(StateSpec):
    """RWKV 4's channel mixing: an MLP with squared ReLU, times a gate, both of a token's input and the one before, each
    mixed in its own way.

    Attributes:
        intermediate_size: of the MLP.
    """

    split_by: ClassVar[str] = "intermediate_size"

    intermediate_size: int


@dataclass(frozen=True)
class MlstmSpec(StateSpec):
    """The matrix memory of xLSTM (arXiv:2405.04517, section 2.3), whose reads go through LayerNorm by head and are
    gated by a sigmoid.

    Attributes:
        key_dim, value_dim: of a head.
        cap: of the gates' soft-cap.
        eps: added to what is divided by.
        norm_eps: of the norm.
    """

    heads: int
    key_dim: int
    value_dim: int
    cap: float
    eps: float
    norm_eps: float
