"""transformers' module of a model without its weights, and what the engine has to know of it before it loads them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm.config.checkpoint.auto_config import describe, load_auto_config, longest_context
from vllm.config.checkpoint.config import HFConfig
from vllm.models.registry import with_causal_names
from vllm.models.transformers.experts import EXPERTS, register_experts
from vllm.models.transformers.layers import paged_attention_forward
from vllm.models.transformers.probe import PAGED, PROBED, AttentionCall, probe, register_probe

# Endings of the names of encoder-decoders.
_OTHER_ENDINGS = ("Model", "ForConditionalGeneration", "ForSequenceClassification", "ForTokenClassification")
# Kinds in a configuration's layer_types: attention over a cache of keys and values, and layers without any.
_LAYER_KINDS = {
    "attention",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "dense",
    "sparse",
    "mlp",
    "moe",
}

_building = threading.Lock()


@dataclass(frozen=True)
class ModelPlan:
    """The findings of a run without data.

    Attributes:
        calls: the attention layers in the order in which they run.
        base: the name of the module that gives the final hidden states.
        hidden_size: their width.
        vocab_size: logits of a row.
    """

    calls: tuple[AttentionCall, ...]
    base: str
    hidden_size: int
    vocab_size: int

    @property
    def cache_heads(self) -> int:
        """Key/value heads of a cell of the cache: those of the layer that has the most."""
        return max(call.num_kv_heads for call in self.calls)

    @property
    def cache_dim(self) -> int:
        """Width of a head in the cache: the widest key or value."""
        return max(max(call.key_dim, call.value_dim) for call in self.calls)


def load_transformers_config(
    raw: dict[str, Any], folder: Path, generation: dict[str, Any], trust_remote_code: bool
) -> HFConfig:
    """The configuration of a model that runs as transformers' module; `raw` is the content of config.json.

    Raises:
        ValueError: transformers does not know it, or it does what cannot be done here; the message names the class.
    """
    auto = load_auto_config(raw, folder, trust_remote_code)
    _, plan = build(auto, raw, folder, trust_remote_code, PROBED)
    geometry = {
        "hidden_size": plan.hidden_size,
        "vocab_size": plan.vocab_size,
        "num_hidden_layers": len(plan.calls),
        "num_attention_heads": max(call.num_heads for call in plan.calls),
        "num_key_value_heads": plan.cache_heads,
        "head_dim": plan.cache_dim,
    }
    return describe(auto, geometry, raw, generation)


def build(
    auto: Any, raw: dict[str, Any], folder: Path, trust_remote_code: bool, attention: str = PAGED
) -> tuple[Any, ModelPlan]:
    """The module, and its plan. Its parameters are on the meta device; its buffers, too, for `attention` PROBED.

    Raises:
        ValueError: it does what cannot be done here.
    """
    model_class = find_class(auto, raw, folder, trust_remote_code)
    problem = _unsupported(model_class, auto)
    if problem is not None:
        raise refusal(model_class, problem)
    register_functions()
    try:
        model = _construct(model_class, auto, PROBED)
    except Exception as error:  # its code may do anything
        reason = f"transformers cannot build it from this config.json ({type(error).__name__}: {error})"
        raise refusal(model_class, reason) from error
    plan = _plan(model, auto)
    if attention == PROBED:
        return None, plan
    return _construct(model_class, auto, attention), plan


def find_class(auto: Any, raw: dict[str, Any], folder: Path, trust_remote_code: bool) -> type[Any]:
    """The class of the causal language model that config.json names. ValueError: there is none."""
    remote = (raw.get("auto_map") or {}).get("AutoModelForCausalLM")
    if remote is not None and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(remote, str(folder))
    import transformers
    from transformers.models.auto import modeling_auto as lists

    known = set(lists.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    # Mistral 4 is left out of that list, not of this one.
    known |= {name for name in lists.MODEL_FOR_PRETRAINING_MAPPING_NAMES.values() if name.endswith("ForCausalLM")}
    names: Sequence[str] = raw.get("architectures") or ()
    for name in with_causal_names(names):
        if name in known:
            return getattr(transformers, name)
    given = ", ".join(names) or "none"
    bases = [name.removesuffix(ending) for name in names for ending in _OTHER_ENDINGS if name.endswith(ending)]
    encoder = next((f"{base}EncoderModel" for base in bases if hasattr(transformers, f"{base}EncoderModel")), None)
    advice = f"; its encoder runs with hf_overrides={{'architectures': ['{encoder}']}}" if encoder else ""
    base = lists.MODEL_MAPPING_NAMES.get(str(raw.get("model_type")))
    if not advice and isinstance(base, str) and not any(hasattr(transformers, name) for name in names):
        advice = (
            f"; hf_overrides={{'architectures': ['{base}']}} runs transformers' model of this model_type in its place"
        )
    code = f"; it has code of its own ({remote}): pass trust_remote_code=True" if remote else ""
    raise ValueError(
        f"config.json: architectures names {given}, which is no causal language model of transformers "
        f"{transformers.__version__}, and has no model here{code}{advice}"
    )


def refusal(model_class: type[Any], reason: object) -> ValueError:
    """The error for a model that cannot run."""
    return ValueError(
        f"{model_class.__name__} cannot run as transformers' module (model_impl='transformers'): {reason}"
    )


def _unsupported(model_class: type[Any], auto: Any) -> str | None:
    """Why a class cannot run, as far as it says so itself."""
    if getattr(auto, "is_encoder_decoder", False):
        return "it is an encoder-decoder, whose cross-attention is not implemented"
    if getattr(model_class, "_is_stateful", False):
        return "it has a recurrent state (state-space or linear attention), which is not implemented"
    parts = getattr(auto, "sub_configs", None) or ()
    if "text_config" in parts:
        return f"it is made of several models ({', '.join(sorted(parts))}), which is not implemented"
    kinds = set(getattr(auto, "layer_types", None) or ()) - _LAYER_KINDS
    if kinds:
        return f"its layers of the kind {', '.join(sorted(map(str, kinds)))} are not implemented"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    return None


def register_functions() -> None:
    """Make our attention and experts known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, paged_attention_forward)
    register_probe()
    register_experts()


def _construct(model_class: type[Any], auto: Any, attention: str) -> Any:
    # A copy: the class writes into it.
    auto = copy.deepcopy(auto)
    auto._experts_implementation = EXPERTS
    with ExitStack() as stack:
        if attention == PROBED:
            stack.enter_context(torch.device("meta"))
        else:
            stack.enter_context(_parameters_on_meta())
        dtype = torch.get_default_dtype()
        model = model_class._from_config(auto, dtype=dtype, attn_implementation=attention)
    model.requires_grad_(False)
    _fix_rotations(model)
    return model.eval()


def construct_plain(model_class: type[Any], auto: Any, dtype: torch.dtype, attention: str | None = None) -> Any:
    """A module as transformers itself runs it, but for its `attention`; its parameters are on the meta device, its
    buffers on the CPU."""
    with torch.device("cpu"), _parameters_on_meta():
        model = model_class._from_config(copy.deepcopy(auto), dtype=dtype, attn_implementation=attention)
    return model.requires_grad_(False).eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that this thread's modules get are moved to the meta device; buffers keep their values."""
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and threading.get_ident() == thread:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
            if type(module).__module__.startswith("torch."):
                # It sets its buffers itself, and transformers need not draw first values for its parameters.
                module._is_hf_initialized = True  # type: ignore[assignment]
        register(module, name, parameter)

    with _building:
        nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _fix_rotations(model: nn.Module) -> None:
    """Keep the rotations that hold up to the trained length, where `longest_context` ends."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kind, dict):
            for layers, own in kind.items():
                if "dynamic" in own or own == "longrope":
                    kind[layers] = "default"


def _plan(model: Any, auto: Any) -> ModelPlan:
    """ValueError: what the model does cannot be done here."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise refusal(type(model), "its output layer is not one linear layer")
    try:
        name, base = _find_base(model)
        # Models with such a method give texts other positions than those that a step has.
        if hasattr(getattr(base, "embeddings", None), "create_position_ids_from_input_ids"):
            raise ValueError("its positions begin after the padding token's id")
        calls, hidden_size = probe(base, longest_context(auto))
    except ValueError as error:
        raise refusal(type(model), error) from error
    except Exception as error:  # its code may do anything
        what = str(error).split("\n")[0].split(". ")[0]
        reason = f"its code looks at values of tensors, or fails, where it is run without data ({what})"
        raise refusal(type(model), reason) from error
    return ModelPlan(calls, name, hidden_size, head.out_features)


def _find_base(model: Any) -> tuple[str, Any]:
    """The innermost module that gives the model its hidden states, and its name. ValueError: there is none."""
    from transformers import PreTrainedModel

    name, found = "", model
    while True:
        inner = [each for each in found.named_children() if isinstance(each[1], PreTrainedModel)]
        if not inner:
            break
        if len(inner) > 1:
            raise ValueError(f"{type(found).__name__} is made of several models")
        name, found = f"{name}.{inner[0][0]}".lstrip("."), inner[0][1]
    if found is model:
        raise ValueError("it has no base model apart from its output layer")
    return name, found
