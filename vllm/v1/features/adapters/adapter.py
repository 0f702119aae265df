"""An adapter's folder, as peft writes it: adapter_config.json and adapter_model.safetensors (or .bin)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm.config.checkpoint.weight_files import iterate_tensors

CONFIG_NAME = "adapter_config.json"
_WEIGHT_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
# Settings that only training or peft itself uses, or that the tensors' names say, too.
_WITHOUT_EFFECT = frozenset(
    "alpha_pattern arrow_config auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config "
    "exclude_modules fan_in_fan_out inference_mode init_lora_weights init_weights layers_pattern layers_to_transform "
    "loftq_config lora_alpha lora_bias lora_dropout lora_ga_config megatron_core modules_to_save parent_library "
    "peft_type peft_version qalora_group_size r rank_pattern revision runtime_config target_modules target_parameters "
    "task_type token_indices trainable_token_indices use_dora use_qalora use_rslora velora_config".split()
)
# Methods that store whole tensors alone.
_WHOLE = ("LN_TUNING", "TRAINABLE_TOKENS")
# Ways to begin a training from unchanged base weights; others take the adapter's product away from them.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica", "default")
_KINDS = re.compile(
    r"(?P<module>.+?)\.(?P<kind>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector(?:\.weight)?)"
)
_TOKENS = re.compile(r"(?P<module>.+?)(?:\.token_adapter)?\.trainable_tokens_delta")


@dataclass
class LoraTensors:
    """A file's tensors for one module: s B A, of which the base weight is [N, K].

    Attributes:
        scale: s.
        a: [r, K].
        b: [N, r].
        bias: [N], added to B's result; None: it has none.
        magnitude: [N], DoRA's; None: it has none.
        is_embedding: `a` is of a table's rows.
        stacks: by the name of a parameter of the module that may be meant, a stack of experts' matrices: E, and s in
            place of `scale`. `a` is [E r, K] and `b` [N, r E] then. None: the module is a linear or an embedding.
        group_size: `a` may be [r, K / group_size], of the means of so many inputs, times K / group_size (QA-LoRA, Xu et
            al. 2023).
    """

    scale: float
    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    magnitude: Tensor | None = None
    is_embedding: bool = False
    stacks: dict[str, tuple[int, float]] = field(default_factory=dict)
    group_size: int = 1


@dataclass
class AdapterFile:
    """An adapter as it is stored.

    Attributes:
        name: its folder and file, for messages.
        modules: by the names that transformers gives them.
        saved: whole tensors that take the place of the base model's, by their names.
        tokens: by a table's module, the numbers of tokens, int64 [n], and their rows [n, H], in place of the model's.
    """

    name: str
    modules: dict[str, LoraTensors] = field(default_factory=dict)
    saved: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Config:
    """The part of adapter_config.json that scales what is added."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: dict[str, int]
    alphas: dict[str, float]
    parameters: tuple[str, ...]  # the last parts of target_parameters
    group_size: int
    tokens: list[int] | dict[str, list[int]]

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) where it is rank-stabilised (Kalajdzievski 2023)."""
        rank = self.rank_of(module)
        alpha = float(_by_pattern(self.alphas, module, self.alpha))
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank

    def names_of(self, module: str) -> list[str]:
        """By which patterns may know a linear."""
        return [module, f"{module}.weight"] if "weight" in self.parameters else [module]

    def stacks_of(self, module: str, rank: int) -> dict[str, tuple[int, float]]:
        """See LoraTensors.stacks: of tensors with `rank` rows and columns."""
        names = {name: f"{module.replace('.base_layer', '')}.{name}" for name in self.parameters if name != "weight"}
        return {
            name: (rank // self.rank_of(whole), self.scale_of(whole))
            for name, whole in names.items()
            if rank % self.rank_of(whole) == 0
        }

    def tokens_of(self, module: str) -> list[int]:
        """The tokens whose rows a table's tensor has."""
        return self.tokens if isinstance(self.tokens, list) else _by_pattern(self.tokens, module, [])


def _by_pattern(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that is the end of the module's name, as peft finds it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_adapter(folder: Path, max_rank: int) -> AdapterFile:
    """Read an adapter's files and check what they say.

    Raises:
        ValueError: a file is missing or damaged, an option is not supported, a tensor is incomplete or not finite or
            has a wrong shape, or a rank is above `max_rank`; it names the file, the tensor, the value and the limit.
    """
    config = _read_config(folder)
    path = next((folder / name for name in _WEIGHT_NAMES if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"{folder} has neither {' nor '.join(_WEIGHT_NAMES)}")
    found = AdapterFile(f"{folder.name}/{path.name}")
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in iterate_tensors([path]):
        if not tensor.is_floating_point():
            raise ValueError(f"{found.name}: {name} must have a floating-point dtype, got {tensor.dtype}")
        if not tensor.isfinite().all():
            raise ValueError(f"{found.name}: {name} has values that are not finite (NaN or infinity)")
        own = name.removeprefix(_PREFIX).replace(".ln_tuning_layers.", ".")
        match, of_tokens = _KINDS.fullmatch(own), _TOKENS.fullmatch(own)
        if match is not None:
            parts.setdefault(match["module"], {})[match["kind"].removesuffix(".weight")] = tensor
        elif of_tokens is not None:
            found.tokens[of_tokens["module"]] = _token_rows(
                f"{found.name}: {name}", of_tokens["module"], tensor, config
            )
        elif "lora_" in own.rpartition(".")[2] or ".lora_" in own:
            raise ValueError(f"{found.name}: {name} is a tensor of an adapter that is not supported")
        else:
            found.saved[own] = tensor
    if not (parts or found.saved or found.tokens):
        raise ValueError(f"{found.name} has no tensors")
    for module, tensors in parts.items():
        found.modules[module] = _module(found.name, module, tensors, config, max_rank)
    return found


def _token_rows(name: str, module: str, rows: Tensor, config: _Config) -> tuple[Tensor, Tensor]:
    ids = config.tokens_of(module)
    if rows.dim() != 2 or len(rows) != len(ids):
        raise ValueError(f"{name} must have a row for each of {len(ids)} trainable tokens, got {tuple(rows.shape)}")
    return torch.tensor(ids, dtype=torch.int64), rows


def _module(file: str, module: str, tensors: dict[str, Tensor], config: _Config, max_rank: int) -> LoraTensors:
    kinds = ("lora_embedding_A", "lora_embedding_B") if "lora_embedding_A" in tensors else ("lora_A", "lora_B")
    for kind in kinds:
        if kind not in tensors:
            raise ValueError(f"{file} lacks {module}.{kind}, beside {module}.{next(iter(tensors))}")
    a, b = (tensors[kind] for kind in kinds)
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        raise ValueError(
            f"{file}: {module}.{kinds[0]} and {kinds[1]} must be [r, inputs] and [outputs, r], got {tuple(a.shape)} "
            f"and {tuple(b.shape)}"
        )
    rank, stacks = a.shape[0], config.stacks_of(module, a.shape[0])
    own = next((name for name in config.names_of(module) if config.rank_of(name) == rank), None)
    if own is not None and not module.endswith(".base_layer"):
        stacks = {}
    wanted = max((rank // count for count, _ in stacks.values()), default=rank)
    if wanted > max_rank:
        raise ValueError(f"{file}: {module} has rank {wanted}, above max_lora_rank={max_rank}")
    if own is None and not stacks:
        raise ValueError(f"{file}: {module} has rank {rank}, but {CONFIG_NAME} says {config.rank_of(module)}")
    bias, magnitude = tensors.get("lora_B.bias"), tensors.get("lora_magnitude_vector")
    for name, vector in (("lora_B.bias", bias), ("lora_magnitude_vector", magnitude)):
        if vector is not None and vector.numel() != b.shape[0]:
            raise ValueError(f"{file}: {module}.{name} must have {b.shape[0]} values, got {tuple(vector.shape)}")
    return LoraTensors(
        config.scale_of(own or module),
        a,
        b,
        bias,
        None if magnitude is None else magnitude.flatten(),
        is_embedding="lora_embedding_A" in tensors,
        stacks=stacks,
        group_size=config.group_size,
    )


def _read_config(folder: Path) -> _Config:
    path = folder / CONFIG_NAME
    name = f"{folder.name}/{CONFIG_NAME}"
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG_NAME}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not usable JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{name} must hold an object, got {type(raw).__name__}")
    for problem in _problems(raw):
        raise ValueError(f"{name}: {problem}")
    return _Config(
        raw.get("r", 1),
        float(raw.get("lora_alpha", 8)),
        bool(raw.get("use_rslora")),
        raw.get("rank_pattern") or {},
        raw.get("alpha_pattern") or {},
        tuple(dict.fromkeys(name.rpartition(".")[2] for name in raw.get("target_parameters") or ())),
        raw.get("qalora_group_size", 16) if raw.get("use_qalora") else 1,
        raw.get("trainable_token_indices") or raw.get("token_indices") or [],
    )


def _problems(raw: dict[str, Any]) -> Iterator[str]:
    """Settings of a configuration that cannot be honoured."""
    if raw.get("peft_type") not in ("LORA", *_WHOLE):
        yield f"peft_type must be 'LORA', {', '.join(map(repr, _WHOLE))}, got {raw.get('peft_type')!r}"
    for name, default in (("r", 1 if raw.get("peft_type") in _WHOLE else 0), ("qalora_group_size", 1)):
        number = raw.get(name, default)
        if type(number) is not int or number < 1:
            yield f"{name} must be an integer of at least 1, got {number!r}"
    for name in ("trainable_token_indices", "token_indices"):
        yield from _token_problems(name, raw.get(name) or [])
    alpha = raw.get("lora_alpha", 8)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        yield f"lora_alpha must be a number, got {alpha!r}"
    for name, minimum in (("rank_pattern", 1), ("alpha_pattern", None)):
        yield from _pattern_problems(name, raw.get(name) or {}, minimum)
    init = raw.get("init_lora_weights")
    if init not in _PLAIN_INITS:
        yield (
            f"init_lora_weights={init!r} belongs to a base model whose weights it changed; save the adapter for the "
            "original weights (peft: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for name, value in raw.items():
        if name not in _WITHOUT_EFFECT and value not in (None, False, [], {}, ""):
            yield f"{name}={value!r} is not supported"


def _token_problems(name: str, tokens: Any) -> Iterable[str]:
    for ids in tokens.values() if isinstance(tokens, dict) else [tokens]:
        if not isinstance(ids, list) or any(type(each) is not int or each < 0 for each in ids):
            yield f"{name} must be a list of tokens, or several by module, got {tokens!r}"
        elif len(set(ids)) < len(ids):
            yield f"{name} must have each token once, got {ids!r}"


def _pattern_problems(name: str, patterns: Any, least: int | None) -> Iterable[str]:
    if not isinstance(patterns, dict):
        yield f"{name} must be an object, got {patterns!r}"
        return
    for key, value in patterns.items():
        try:
            re.compile(key)
        except re.error as error:
            yield f"{name} has a pattern that is none, {key!r}: {error}"
        if isinstance(value, bool) or not isinstance(value, int | float) or (least is not None and value < least):
            yield f"{name}[{key!r}] must be a number{'' if least is None else f' of at least {least}'}, got {value!r}"
