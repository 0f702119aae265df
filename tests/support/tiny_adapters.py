"""Random LoRA adapters in peft's files, and what they mean: a transformers model whose weights have them added."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vllm.v1.features.adapters.scheduler import StepAdapters

PREFIX = "base_model.model."


def linears(model: nn.Module, targets: tuple[str, ...] | None = None) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the modules whose names end so; None = all linears but the head."""
    found = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last not in targets if targets is not None else last in ("lm_head", "score", "classifier"):
            continue
        if isinstance(module, nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif type(module).__name__ == "Conv1D":
            found[name] = (module.weight.shape[1], module.weight.shape[0])
    return found


def make_adapter(
    folder: Path,
    model: nn.Module,
    rank: int = 4,
    targets: tuple[str, ...] | None = None,
    seed: int = 0,
    tensors: dict[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter for a transformers model's linears; `tensors` and fields of `config` take the place of what
    there would be. Its effect is about that of the weights."""
    generator = torch.Generator().manual_seed(seed)
    written: dict[str, Tensor] = {}
    for name, (outputs, inputs) in linears(model, targets).items():
        own = _by_pattern(config.get("rank_pattern"), name, rank)
        written[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(own, inputs, generator=generator) * 0.1
        written[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, own, generator=generator) * 0.1
    written |= tensors or {}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(written, folder / "adapter_model.safetensors")
    names = sorted({name.rpartition(".")[2] for name in linears(model, targets)})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names, **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def merged(model: Any, folder: Path) -> Any:
    """A copy of the model with W + s B A in place of each W that the adapter names, and its saved tensors."""
    model = copy.deepcopy(model)
    if "lm_head" in dict(model.named_modules()):
        # A change of one leaves the other.
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    with torch.no_grad():
        for key, a in tensors.items():
            name, _, kind = key.removeprefix(PREFIX).rpartition(".lora_")
            if kind == "A.weight" and name.endswith((".experts", ".base_layer")):
                _add_to_experts(model, config, name, a, tensors[key.replace("lora_A", "lora_B")])
            elif kind == "A.weight":
                b = tensors[key.replace("lora_A", "lora_B")]
                change = scale_of(config, name) * b.double() @ a.double()
                magnitude = tensors.get(f"{PREFIX}{name}.lora_magnitude_vector")
                is_turned = not isinstance(modules[name], nn.Linear)
                _add(modules[name].weight, change, magnitude, is_turned)
            elif kind == "embedding_A":
                b = tensors[key.replace("lora_embedding_A", "lora_embedding_B")]
                magnitude = tensors.get(f"{PREFIX}{name}.lora_magnitude_vector")
                _add(modules[name].weight, scale_of(config, name) * b.double() @ a.double(), magnitude, True)
            elif key.endswith(".trainable_tokens_delta"):
                _replace_tokens(model, config, key.removeprefix(PREFIX).rpartition(".token_adapter")[0], a)
            elif not name and not key.endswith(".base_layer.weight"):
                _replace(model, key.removeprefix(PREFIX).replace(".base_layer.", "."), a)
    return model


def _add(weight: Tensor, change: Tensor, magnitude: Tensor | None, is_turned: bool) -> None:
    """`change` is [outputs, inputs], which the weight is unless it `is_turned`."""
    whole = (weight.T if is_turned else weight).double() + change
    if magnitude is not None:
        whole *= (magnitude.double() / whole.square().sum(1).sqrt())[:, None]
    weight.copy_(whole.T if is_turned else whole)


def _add_to_experts(model: nn.Module, config: dict[str, Any], name: str, a: Tensor, b: Tensor) -> None:
    """peft's target_parameters: A is [experts, r, inputs], B [outputs, r, experts]."""
    module: Any = model.get_submodule(name.replace(".base_layer", ""))
    for stack in (module.gate_up_proj, module.down_proj):
        is_turned = getattr(module, "is_transposed", False)
        wanted = (len(stack), *((a.shape[1], len(b)) if is_turned else (len(b), a.shape[1])))
        if tuple(stack.shape) == wanted:
            parts = a.unflatten(0, (len(stack), -1)), b.unflatten(1, (-1, len(stack)))
            for expert, weight in enumerate(stack):
                change = scale_of(config, name) * parts[1][..., expert].double() @ parts[0][expert].double()
                weight.add_((change.T if is_turned else change).to(weight))


def _replace_tokens(model: Any, config: dict[str, Any], name: str, rows: Tensor) -> None:
    """Replace a tied head's, too, unless it has its own."""
    indices = config["trainable_token_indices"]
    own = indices if isinstance(indices, list) else indices[name.rpartition(".")[2]]
    model.get_submodule(name).weight[own] = rows
    if model.config.tie_word_embeddings and isinstance(indices, list):
        model.lm_head.weight[own] = rows


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    """A parameter, which may be a bias that there was none of."""
    module, _, kind = name.rpartition(".")
    setattr(model.get_submodule(module), kind, nn.Parameter(value.clone()))


def scale_of(config: dict[str, Any], name: str) -> float:
    """The factor of B A in the module `name`."""
    rank = _by_pattern(config.get("rank_pattern"), name, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _by_pattern(patterns: dict[str, Any] | None, name: str, default: Any) -> Any:
    return next((value for key, value in (patterns or {}).items() if re.search(rf"(^|\.)({key})$", name)), default)


def give_adapters(llm: Any, adapter_of: Callable[[list[int]], Any]) -> None:
    """Let requests run with the LoRARequest, which its worker has loaded, that `adapter_of` has for their prompts."""
    runner = llm.llm_engine.engine_core.executor.worker.model_runner
    update = runner._update_states

    def update_states(step: Any) -> None:
        prompts = {new.req_id: new.prefill_token_ids[: new.num_prompt_tokens] for new in step.scheduled_new_reqs}
        found = {req_id: adapter_of(prompt) for req_id, prompt in prompts.items()}
        step.parts.add(StepAdapters((req_id, adapter) for req_id, adapter in found.items() if adapter is not None))
        update(step)

    runner._update_states = update_states
