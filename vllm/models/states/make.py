"""Which module a StateSpec means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.layers.state import StateLayer
from vllm.models.spec import StateSpec
from vllm.models.states.channel_delta_rule import ChannelDeltaRule
from vllm.models.states.delta_rule import DeltaRule
from vllm.models.states.lightning import Lightning
from vllm.models.states.mamba import Mamba
from vllm.models.states.mamba2 import Mamba2
from vllm.models.states.mlstm import Mlstm
from vllm.models.states.rg_lru import RgLru
from vllm.models.states.short_conv import ShortConv
from vllm.models.states.specs import (
    ChannelDeltaSpec,
    ChannelMixSpec,
    DeltaRuleSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    MlstmSpec,
    RgLruSpec,
    ShortConvSpec,
    WkvSpec,
)
from vllm.models.states.wkv import ChannelMix, TimeMix

_KINDS: dict[type[StateSpec], Callable[[Any, int], StateLayer]] = {
    ChannelDeltaSpec: ChannelDeltaRule,
    ChannelMixSpec: ChannelMix,
    DeltaRuleSpec: DeltaRule,
    LightningSpec: Lightning,
    Mamba2Spec: Mamba2,
    MambaSpec: Mamba,
    MlstmSpec: Mlstm,
    RgLruSpec: RgLru,
    ShortConvSpec: ShortConv,
    WkvSpec: TimeMix,
}


def make_state_layer(spec: StateSpec, hidden_size: int) -> StateLayer:
    """The module of `spec`."""
    return _KINDS[type(spec)](spec, hidden_size)
