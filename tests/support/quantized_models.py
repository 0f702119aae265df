"""Tiny models whose linears are rounded to a format's values, and the same models with these as plain weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny, tiny_config
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from vllm import LLM, SamplingParams

# Sums in float32 in another order; the bound.
TOLERANCE = 1e-3

PROMPTS = [[5, 9, 33, 7, 121, 64, 3], [17], [88, 2, 41, 60, 150, 13, 13, 77, 101, 6, 31, 90, 91, 92, 93, 4, 8, 15]]


@dataclass
class Stored:
    """One weight as a format stores it: its tensors by their names within the module, and its value, float32 [N, K]."""

    tensors: dict[str, Tensor]
    value: Tensor


Pack = Callable[[str, Tensor], Stored | None]
"""Stores a module's weight by its name; None: the module is not quantised."""


@dataclass
class Quantized:
    """A folder with a quantised checkpoint, and transformers' model with the values that it means."""

    folder: Path
    model: Any
    names: list[str] = field(default_factory=list)


def make_quantized(
    folder: Path,
    pack: Pack,
    settings: dict[str, Any],
    model_type: str = "llama",
    where: str = "config.json",
    **fields: Any,
) -> Quantized:
    """A random model of `model_type` whose two-dimensional "proj" weights (and those of other linears) went through
    `pack`; `settings` become its quantization_config, or the content of the file `where`."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "ffn_dim": 256, "num_hidden_layers": 2, "head_dim": 32}
    known = tiny_config(model_type).to_dict()
    usual = {name: size for name, size in sizes.items() if name == "hidden_size" or known.get(name) is not None}
    model = make_tiny(model_type, folder, **(usual | fields))
    path = folder / "model.safetensors"
    kinds = torch.nn.Linear, Conv1D
    linears = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    names = []
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        # Conv1D has its weight transposed; quantisers store what a linear would have.
        turns = module in linears and isinstance(linears[module], Conv1D)
        is_weight = module in linears and name.endswith(".weight")
        stored = pack(module, tensor.T if turns else tensor) if is_weight else None
        if stored is None:
            tensors[name] = tensor
            continue
        names.append(module)
        values[name] = stored.value.T if turns else stored.value
        tensors |= {f"{module}.{own}": each.clone().contiguous() for own, each in stored.tensors.items()}
    assert names
    save_file(tensors, path, metadata={"format": "pt"})
    _write_settings(folder, settings, where)
    model.load_state_dict(values, strict=False)
    return Quantized(folder, model, names)


def _write_settings(folder: Path, settings: dict[str, Any], where: str) -> None:
    if where != "config.json":
        (folder / where).write_text(json.dumps(settings))
        return
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


def make_llm(folder: Path, **fields: Any) -> LLM:
    """The engine on a folder, in float32."""
    usual = {"dtype": "float32", "max_model_len": 64, "max_logprobs": -1, "skip_tokenizer_init": True}
    return LLM(str(folder), **(usual | fields))


PARAMS = SamplingParams(max_tokens=4, temperature=0, logprobs=5, prompt_logprobs=3, ignore_eos=True, detokenize=False)


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    """Greedy tokens with readings, of the prompts too."""
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False)


@torch.no_grad()
def errors(output: Any, model: Any, prompt: list[int]) -> list[float]:
    """At each position of a prompt and its output, the greatest difference to the logprobs of transformers' `model`."""
    ids = [*prompt, *output.outputs[0].token_ids]
    expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    readings = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [
        max(abs(entry.logprob - expected[position, token].item()) for token, entry in reading.items())
        for position, reading in enumerate(readings)
    ]


@torch.no_grad()
def assert_reads(outputs: list[Any], model: Any, prompts: list[list[int]] = PROMPTS) -> None:
    """All readings are those of transformers' `model`, and the tokens are its greedy ones."""
    for prompt, output in zip(prompts, outputs, strict=True):
        assert max(errors(output, model, prompt)) < TOLERANCE
        ids = [*prompt, *output.outputs[0].token_ids]
        greedy = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].argmax(-1)[len(prompt) - 1 : -1]
        assert list(output.outputs[0].token_ids) == greedy.tolist()
