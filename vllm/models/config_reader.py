"""Reads a family's options from config.json, and refuses those that the family does not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from vllm.config.checkpoint.config import HFConfig, scaled_context
from vllm.layers.activation import ACTIVATION_NAMES
from vllm.models.options_without_effect import has_no_effect
from vllm.models.rope_options import RopeDefaults, read_rope
from vllm.models.spec import AnyMixer, AttentionSpec, DecoderSpec, MlpSpec, MoeSpec, NormSpec, RotarySpec, attentions_of
from vllm.ops.choose_experts import ExpertChoice

_RMS_EPS = ("rms_norm_eps", "layernorm_epsilon", "norm_eps", "layer_norm_epsilon")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_ACTIVATIONS = ("hidden_act", "activation_function", "activation")
_LAYER_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "layernorm_epsilon")


class ConfigReader:
    """Typed access to one config.json under any of an option's names. An option that is neither read nor without
    effect nor neutral is refused by `check_all_read`. All methods raise ValueError, which names the file, option and
    value."""

    def __init__(self, config: HFConfig) -> None:
        self.config = config
        self._raw, self._where = config.raw, config.where
        self._read: set[str] = set()
        self.hidden_size = self.integer("hidden_size", "n_embd", "d_model", "dim", "embedding_dim")
        self.num_layers = self.integer("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_blocks")

    @property
    def num_heads(self) -> int:
        return self.integer("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of `names` that is there and not null; all of them count as read."""
        self._read.update(names)
        return next((self._raw[name] for name in names if self._raw.get(name) is not None), default)

    def is_given(self, name: str) -> bool:
        """Whether config.json has the option, be it null."""
        return name in self._raw

    def ignore(self, *names: str) -> None:
        """Options that do not change what this family computes."""
        self._read.update(names)

    def integer(self, *names: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.need(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self._where}: {names[0]} must be a positive integer, got {value!r}")
        return value

    def count(self, *names: str, default: int) -> int:
        """An integer of at least 0."""
        value = self.get(*names, default=default)
        return 0 if value == 0 and not isinstance(value, bool) else self.integer(*names, default=default)

    def number(self, *names: str, default: float | None = None) -> float:
        """A number."""
        value = self.need(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self._where}: {names[0]} must be a number, got {value!r}")
        return float(value)

    def optional_number(self, *names: str, default: float | None = None) -> float | None:
        """A number, or None where the config says null or nothing."""
        if any(name in self._raw for name in names):
            default = None
        return None if self.get(*names, default=default) is None else self.number(*names, default=default)

    def boolean(self, *names: str, default: bool) -> bool:
        """True or false."""
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise ValueError(f"{self._where}: {names[0]} must be true or false, got {value!r}")
        return value

    def need(self, *names: str, default: Any = None) -> Any:
        """`get`, of what must be there."""
        value = self.get(*names, default=default)
        if value is None:
            raise ValueError(f"{self._where} has no {names[0]}")
        return value

    def only(self, name: str, *values: Any) -> None:
        """Refuse the option `name` unless it has one of these values, or is not there."""
        if (value := self.get(name)) is not None and value not in values:
            raise self.refuse(name, f"it must be {' or '.join(map(repr, values))}")

    def refuse(self, name: str, reason: str) -> ValueError:
        """The error for an option whose value is not supported."""
        return ValueError(f"{self._where}: {name}={self._raw.get(name)!r} is not supported: {reason}")

    # Several families have these in common.

    @property
    def head_dim(self) -> int:
        return self.integer("head_dim", "kv_channels", default=self.hidden_size // self.num_heads)

    def head_dim_or(self, default: int) -> int:
        """`head_dim`, or `default` where the file does not name it."""
        return default if "head_dim" not in self._raw else self.head_dim

    def norm(self, kind: Literal["rms", "layer"] = "rms", eps: float | None = None, **fields: Any) -> NormSpec:
        """A norm with the config's epsilon, `eps` if it has none."""
        names = _RMS_EPS if kind == "rms" else _LAYER_EPS
        return NormSpec(kind, self.number(*names, default=1e-6 if eps is None else eps), **fields)

    def layer_norm(self, **fields: Any) -> NormSpec:
        """LayerNorm with weight and bias."""
        return self.norm("layer", 1e-5, **({"bias": True} | fields))

    def rotary(self, head_dim: int, interleaved: bool = False, kind: str | None = None, **defaults: Any) -> RotarySpec:
        """Rotary positions by rope_parameters (or the older rope_scaling and rope_theta) of layers of `kind` (None =
        all); `defaults` are fields of RopeDefaults."""
        usual = RopeDefaults(**defaults)
        self.get("rope_scaling", "rope_parameters", "original_max_position_embeddings", *usual.theta_names)
        self.get("partial_rotary_factor", *usual.share_names)
        if kind is not None:
            self.get("rope_local_base_freq")
        rope, share = read_rope(self._raw, self._where, usual, kind)
        dim = head_dim if rope.rope_type == "proportional" else int(head_dim * share)
        return RotarySpec(dim, rope, interleaved)

    def attention(self, rotary: RotarySpec | bool = True, bias: bool | None = None, **fields: Any) -> AttentionSpec:
        """Grouped-query attention; `rotary`: True = the usual one. `bias`: of all projections, attention_bias if
        None."""
        head_dim = fields.pop("head_dim", None) or self.head_dim
        bias = self.boolean("attention_bias", default=False) if bias is None else bias
        if rotary is not False:
            fields["rotary"] = self.rotary(head_dim) if rotary is True else rotary
        kv_heads = self.integer("num_key_value_heads", default=self.num_heads)
        if self.num_heads % kv_heads:
            raise ValueError(
                f"{self._where}: num_attention_heads must be a multiple of num_key_value_heads={kv_heads}, "
                f"got {self.num_heads}"
            )
        common: dict[str, Any] = {"num_kv_heads": kv_heads, "qkv_bias": bias, "o_bias": bias}
        return AttentionSpec(num_heads=self.num_heads, head_dim=head_dim, **(common | fields))

    def windowed(
        self,
        attention: AttentionSpec,
        default_window: int | None = None,
        switch: str | None = None,
        default_kinds: Sequence[str] | None = None,
    ) -> tuple[AttentionSpec, ...]:
        """The attention of each layer: those of the kind "sliding_attention" have the window `sliding_window`, if the
        option `switch` allows it. Without layer_types the kinds are `default_kinds`, or all layers are of that kind,
        with a switch those from max_window_layers on."""
        window = self.get("sliding_window", default=None if "sliding_window" in self._raw else default_window)
        if switch is not None and not self.boolean(switch, default=False):
            if window is not None and "sliding_attention" in (self.get("layer_types") or ()):
                raise self.refuse(switch, "layer_types names sliding_attention")
            window = None
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ValueError(f"{self._where}: sliding_window must be a positive integer or null, got {window!r}")
        first = self.get("max_window_layers", default=28) if switch is not None else 0
        default = ["full_attention" if index < first else "sliding_attention" for index in range(self.num_layers)]
        kinds = self.layer_kinds(default if default_kinds is None else default_kinds)
        full = replace(attention, window=None)
        sliding = replace(attention, window=window)
        return tuple(sliding if kind == "sliding_attention" else full for kind in kinds)

    def by_kind(
        self, attention: AttentionSpec, default_kinds: Sequence[str], default_window: int, **defaults: Any
    ) -> tuple[AttentionSpec, ...]:
        """`windowed`, with rotary positions of each kind's own; `defaults` are fields of RopeDefaults."""
        layers = self.windowed(attention, default_window, default_kinds=default_kinds)
        by_kind = {
            kind: self.rotary(attention.head_dim, kind=kind, **defaults)
            for kind in ("full_attention", "sliding_attention")
        }
        kinds = self.layer_kinds(default_kinds)
        return tuple(replace(layer, rotary=by_kind[kind]) for layer, kind in zip(layers, kinds, strict=True))

    def mlp(
        self,
        activation: str = "silu",
        bias: bool | None = None,
        activation_names: Sequence[str] = _ACTIVATIONS,
        **fields: Any,
    ) -> MlpSpec:
        """An MLP; `activation` is the family's default, `bias` mlp_bias if None."""
        bias = self.boolean("mlp_bias", default=False) if bias is None else bias
        names = "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"
        sizes = fields.pop("sizes", None)
        size = sizes[0] if sizes else self.integer(*names, default=fields.pop("size", None))
        act = self._activation(activation, activation_names)
        return MlpSpec(size, act, **({"up_bias": bias, "down_bias": bias} | fields))

    def _activation(self, default: str, names: Sequence[str]) -> str:
        act = self.get(*names, default=default)
        if act not in ACTIVATION_NAMES:
            known = ", ".join(sorted(ACTIVATION_NAMES))
            raise ValueError(f"{self._where}: the activation ({names[0]}) must be one of {known}, got {act!r}")
        return str(act)

    def mixture(self, size: int, experts: int | None, chosen: int | None, **fields: Any) -> MoeSpec:
        """A mixture of experts of this size; `experts` and `chosen`, their number and that of a token's, are the
        family's defaults. `fields` are those of MoeSpec and of ExpertChoice, beside them `shared_size`: width of the
        MLP that all tokens take, 0 = none, `activation_names`: those of that option, and `own_activation`: the
        experts', whatever config.json says."""
        num_experts = self._of_all_layers(*_EXPERTS, default=experts)
        num_chosen = self._of_all_layers(*_CHOSEN, default=chosen)
        if num_chosen > num_experts:
            raise ValueError(f"{self._where}: a token cannot have {num_chosen} of {num_experts} experts")
        names = fields.pop("activation_names", _ACTIVATIONS)
        act = self._activation(fields.pop("activation", "silu"), names)
        bias = fields.pop("mlp_bias", False)
        if shared_size := fields.pop("shared_size", 0):
            fields["shared"] = MlpSpec(shared_size, act, up_bias=bias, down_bias=bias)
        of_choice = {name: fields.pop(name) for name in ExpertChoice.__dataclass_fields__ if name in fields}
        choice = ExpertChoice(num_chosen, **of_choice)
        if num_experts % choice.num_groups or num_chosen > num_experts // choice.num_groups * choice.num_groups_kept:
            raise ValueError(
                f"{self._where}: a token's {num_chosen} experts cannot be of {choice.num_groups_kept} of "
                f"{choice.num_groups} groups of {num_experts}"
            )
        return MoeSpec(num_experts, size, choice, fields.pop("own_activation", act), **fields)

    def _of_all_layers(self, *names: str, default: int | None) -> int:
        """A positive integer, or the one that a list has for each layer."""
        value = self.get(*names)
        if isinstance(value, list) and value and value == value[:1] * self.num_layers and isinstance(value[0], int):
            return value[0]
        given = [name for name in names if self._raw.get(name) is not None]
        return self.integer(*given, *names, default=default)

    def mixed(self, mixture: MoeSpec, mlp: MlpSpec, kinds: Sequence[str]) -> tuple[MlpSpec | MoeSpec, ...]:
        """`mixture` for each layer, or `mlp` where mlp_layer_types, by default `kinds`, says "dense", not "sparse"."""
        kinds = self.kinds("mlp_layer_types", kinds, "dense", "sparse")
        return tuple(mixture if kind == "sparse" else mlp for kind in kinds)

    def first_dense(self, count: int) -> list[str]:
        """For `mixed`: the first `count` layers are dense."""
        return ["dense" if index < count else "sparse" for index in range(self.num_layers)]

    def decoder(
        self,
        attention: AnyMixer | Sequence[AnyMixer | None],
        mlp: MlpSpec | MoeSpec | Sequence[MlpSpec | MoeSpec | None],
        norm: NormSpec,
        tied: bool = False,
        **fields: Any,
    ) -> DecoderSpec:
        """The whole; one `attention` (or what is in its place) or `mlp` stands for all layers, `tied` is the family's
        default."""
        layers = tuple(attention) if isinstance(attention, Sequence) else (attention,) * self.num_layers
        mlps = (mlp,) * self.num_layers if isinstance(mlp, MlpSpec | MoeSpec) else tuple(mlp)
        common: dict[str, Any] = {
            "vocab_size": self.integer("padded_vocab_size", "vocab_size"),
            "hidden_size": self.hidden_size,
            "max_positions": self._max_positions(layers, fields.pop("max_positions", None)),
            "final_norm": norm,
            "tie_word_embeddings": self.boolean("tie_word_embeddings", default=tied),
        }
        return DecoderSpec(layers=layers, mlps=mlps, norm=norm, **(common | fields))

    def _max_positions(self, layers: Sequence[AnyMixer | None], given: int | None) -> int:
        names = "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"
        ropes = [layer.rotary.rope for layer in attentions_of(layers) if layer.rotary is not None]
        trained = given or self.integer(*names)
        if given is None and ropes and all(rope == ropes[0] for rope in ropes):
            trained = max(trained, scaled_context(trained, ropes[0].params | {"rope_type": ropes[0].rope_type}))
        bounds = [rope.params["original_max_position_embeddings"] for rope in ropes if rope.rope_type == "longrope"]
        return min([trained, *bounds])

    def every_nth_full(self, count: int, is_first: bool = False) -> list[str]:
        """Kinds of the layers: the last of each `count`, or the first, attends to all tokens."""
        full = 0 if is_first else count - 1
        return ["full_attention" if i % count == full else "sliding_attention" for i in range(self.num_layers)]

    def with_positions(self) -> list[bool]:
        """Which layers have positions, by no_rope_layers, or all but each no_rope_layer_interval-th."""
        interval = self.integer("no_rope_layer_interval", default=4)
        # 1 for a layer with positions.
        flags = self.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(self.num_layers)]
        if not isinstance(flags, list) or len(flags) != self.num_layers:
            raise self.refuse("no_rope_layers", f"it must have {self.num_layers} numbers, 0 or 1")
        return [bool(flag) for flag in flags]

    def layer_kinds(self, default: Sequence[str]) -> list[str]:
        """ "full_attention" or "sliding_attention" of each layer, by layer_types."""
        return self.kinds("layer_types", default, "full_attention", "sliding_attention")

    def kinds(self, name: str, default: Sequence[str], *known: str) -> list[str]:
        """One of `known` for each layer, by the option `name`."""
        kinds = self.get(name, default=list(default))
        if not isinstance(kinds, list) or len(kinds) != self.num_layers or set(kinds) - set(known):
            raise ValueError(
                f"{self._where}: {name} must name {' or '.join(known)} for each of {self.num_layers} layers, "
                f"got {kinds}"
            )
        return kinds

    def check_all_read(self, model: type) -> None:
        """
        Args:
            model: the class that describes the model; its module is the family.

        Raises:
            ValueError: the config has an option that `model` does not know, with a value that is not neutral.
        """
        family = model.__module__.rpartition(".")[2]
        for name, value in self._raw.items():
            if name in self._read or has_no_effect(name, family) or _is_neutral(value):
                continue
            if name == "rope_parameters" and isinstance(value, dict) and value.get("rope_type") == "default":
                # Some writers add the usual ones, also to models that have no rotary positions.
                continue
            if name == "layer_types" and set(value) == {"full_attention"}:
                continue
            raise ValueError(
                f"{self._where}: {model.__name__} has no option {name}, got {value!r}; if it does not change what "
                f'the model computes, pass hf_overrides={{"{name}": None}}'
            )


def _is_neutral(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}) or (value is not True and value in (0, 1))
