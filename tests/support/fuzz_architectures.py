"""Tries configurations of every native architecture at random, as config.json may have them: options of transformers'
configuration changed or left out, older spellings, every rotary type. The same file and weights must give transformers'
logits, or be refused.

`python tests/support/fuzz_architectures.py [--trials N] [--seed N] [NAME ...]` prints the differences, and how often
each refusal came; NAME is one of tests/models/architectures.py.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "models")]

from architectures import ARCHITECTURES, VOCAB_SIZE, fill_weights, generating_class  # noqa: E402
from models_util import load_model, paged_logits, random_prompts  # noqa: E402

NUM_LAYERS = 4
LENGTHS = (3, 21, 37)
_TOLERANCE = 1e-4
"""The tolerance for logits of unit variance: float32 sums in two orders, through four layers of sharp weights."""

# Options that change no logits of a decoder, or that a tiny model needs.
_FIXED = re.compile(
    r"""_.*|.*token_id|.*dropout.*|.*drop|.*pdrop|initializer.*|init_.*|use_cache|vocab_size|architectures|model_type|
    .*_layers?|num_hidden_layers|hidden_size|n_embd|d_model|.*heads?|is_.*|add_cross_attention|output_.*|return_dict|
    .*dtype|chunk_size_feed_forward|id2label|label2id|problem_type|summary_.*|transformers_version|pretraining_tp|
    rope_.*|max_.*|n_positions|n_ctx|layer_types|attention_types|attention_layers|.*labels|tokenizer.*|
    cross_attention_hidden_size|.*_in_fp32|afn|layerdrop|seq_length|resid_.*|slow_but_exact|
    reorder_and_upcast_attn|attn_implementation|.*_loss|attn_config""".replace("\n    ", "")
)
_ACTIVATIONS = (
    "silu gelu gelu_new gelu_fast gelu_pytorch_tanh quick_gelu relu relu2 swish gelu_python mish tanh".split()
)
_NUMBERS = {
    "sliding_window": (9, 12, None),
    "window_size": (5, 11),
    "sliding_window_pattern": (1, 2, 3),
    "max_window_layers": (0, 2, 4),
    "no_rope_layer_interval": (2, 3),
    "rotary_dim": (2, 4, 8),
    "clip_qkv": (0.5, 2.0),
    "num_ln_in_parallel_attn": (1, 2),
    "n_inner": (40, 64),
    "intermediate_size": (40, 72),
    "ffn_dim": (40, 72),
    "ffn_hidden_size": (40, 72),
    "expansion_ratio": (2, 3),
    "word_embed_proj_dim": (24, 32),
    "final_logit_softcapping": (3.0, None),
    "attn_logit_softcapping": (2.0, None),
    "query_pre_attn_scalar": (7, 24),
    "logits_soft_cap": (3.0,),
    "num_kv_shared_layers": (0, 1, 2, 3),
    "hidden_size_per_layer_input": (0, 4),
    "vocab_size_per_layer_input": (100, 140),
    "laurel_rank": (4, 12),
    "altup_num_inputs": (1, 2, 3),
    "altup_active_idx": (0, 1),
    "linear_conv_kernel_dim": (2, 3),
    "short_conv_kernel_size": (2, 3),
    "mamba_d_conv": (2, 3),
    "mamba_d_state": (5, 16),
    "mamba_chunk_size": (8, 32),
    "conv_kernel": (2, 3),
    "conv1d_width": (2, 3),
    "conv_L_cache": (2, 4, 5),
    "state_size": (5, 16),
    "ssm_state_size": (6, 16),
    "chunk_size": (8, 32),
    "time_step_min": (0.001, 0.4),
    "attention_window_size": (9, 12),
}
_HEADS = "num_attention_heads n_head num_heads n_heads attention_heads".split()


@dataclass
class Trial:
    """A config.json, and what was changed in it."""

    raw: dict[str, Any]
    changes: list[str]

    def put(self, name: str, value: Any) -> None:
        self.raw[name] = value
        self.changes.append(f"{name}={value!r}")


def make_trial(name: str, rng: random.Random) -> Trial:
    """A configuration of architecture `name`, with up to four changes."""
    from transformers import CONFIG_MAPPING

    model_type, fields = ARCHITECTURES[name]
    defaults = CONFIG_MAPPING[model_type]().to_dict()
    sizes = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if "max_position_embeddings" in defaults:
        sizes["max_position_embeddings"] = 128
    trial = Trial({"model_type": model_type} | sizes | json.loads(json.dumps(fields)), [])
    for _ in range(rng.randint(0, 4)):
        rng.choice((_change_option, _change_option, _change_option, _change_rope, _change_heads, _change_kinds, _drop))(
            trial, defaults, rng
        )
    return trial


def _change_option(trial: Trial, defaults: dict[str, Any], rng: random.Random) -> None:
    names = [each for each in defaults if each in _NUMBERS or not _FIXED.fullmatch(each)]
    if not names:
        return
    option = rng.choice(names)
    value = trial.raw.get(option, defaults[option])
    if option in _NUMBERS:
        trial.put(option, rng.choice(_NUMBERS[option]))
    elif isinstance(value, bool):
        trial.put(option, not value)
    elif "act" in option and isinstance(value, str):
        trial.put(option, rng.choice(_ACTIVATIONS))
    elif "eps" in option or "epsilon" in option:
        trial.put(option, rng.choice((1e-12, 1e-5, 1e-3, 0.05)))
    elif isinstance(value, float):
        trial.put(option, round(value * rng.choice((0.3, 0.6, 1.7)) + rng.choice((0.0, 0.1)), 4))


def _change_rope(trial: Trial, defaults: dict[str, Any], rng: random.Random) -> None:
    if "rope_parameters" not in defaults or any(each.startswith("rope_") for each in trial.raw):
        return
    size = trial.raw.get("head_dim") or _head_dim(trial.raw)
    share = rng.choice((None, None, 0.5, 0.25, 1.0))
    half = max(1, int(size * (share or 1.0)) // 2)
    factor = rng.choice((1.0, 2.0, 4.0, 8))
    options: dict[str, Any] = {
        "default": {},
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "llama3": {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": rng.choice((2.0, 4.0))},
        "yarn": {"factor": factor},
        "longrope": {
            "short_factor": [round(1 + 0.1 * i, 2) for i in range(half)],
            "long_factor": [round(2 + 0.3 * i, 2) for i in range(half)],
        },
        "proportional": {},
    }
    kind = rng.choice(list(options))
    rope: dict[str, Any] = options[kind]
    if kind in ("llama3", "yarn", "longrope") and rng.random() < 0.7:
        rope["original_max_position_embeddings"] = rng.choice((16, 32, 64, 128))
    if kind == "yarn":
        for each, value in (("beta_fast", 16), ("beta_slow", 2), ("attention_factor", 0.9), ("truncate", False)):
            if rng.random() < 0.25:
                rope[each] = value
        if rng.random() < 0.25:
            rope |= {"mscale": 0.7, "mscale_all_dim": rng.choice((1.0, 0.5))}
    if kind == "longrope" and rng.random() < 0.5:
        rope["factor"] = factor
    theta = rng.choice((None, 1000.0, 500000, 10000.0))
    older = rng.random() < 0.5
    if older:
        if theta is not None:
            trial.put(rng.choice(("rope_theta", "rope_theta", "rotary_emb_base")), theta)
        if share is not None:
            trial.put(rng.choice(("partial_rotary_factor", "rotary_pct")), share)
        if kind != "default":
            trial.put("rope_scaling", {rng.choice(("type", "rope_type")): kind} | rope)
        if kind == "longrope" and "original_max_position_embeddings" in rope and rng.random() < 0.5:
            del rope["original_max_position_embeddings"]
            trial.raw["rope_scaling"].pop("original_max_position_embeddings", None)
            trial.put("original_max_position_embeddings", 64)
        return
    rope = {"rope_type": kind} | rope | ({} if theta is None else {"rope_theta": theta})
    if share is not None:
        rope["partial_rotary_factor"] = share
    if "full_attention" in (defaults["rope_parameters"] or {}) and rng.random() < 0.7:
        rope = {rng.choice(("full_attention", "sliding_attention")): rope}
    trial.put("rope_parameters", rope)


def _head_dim(raw: dict[str, Any]) -> int:
    width = next((raw[each] for each in ("hidden_size", "n_embd", "d_model") if each in raw), 32)
    return width // next((raw[each] for each in _HEADS if each in raw), 4)


def _change_heads(trial: Trial, defaults: dict[str, Any], rng: random.Random) -> None:
    changed = rng.choice(("head_dim", "num_key_value_heads", "num_kv_heads", "heads"))
    if changed == "head_dim" and "head_dim" in defaults:
        trial.put("head_dim", rng.choice((6, 12, 16, 20)))
    elif changed in ("num_key_value_heads", "num_kv_heads") and changed in defaults:
        trial.put(changed, rng.choice((1, 2, 4, None)))
    elif changed == "heads":
        option = next((each for each in _HEADS if each in trial.raw), None)
        if option is not None:
            trial.put(option, 2)


def _change_kinds(trial: Trial, defaults: dict[str, Any], rng: random.Random) -> None:
    if "layer_types" in defaults:
        own = trial.raw.get("layer_types") or defaults["layer_types"] or []
        # A model with states, which may have fewer layers.
        has_states = bool({"linear_attention", "conv"} & set(own))
        known = sorted(set(own)) if has_states else ["full_attention", "sliding_attention"]
        count = trial.raw.get("num_hidden_layers", NUM_LAYERS)
        trial.put("layer_types", [rng.choice(known) for _ in range(count)])
    if "no_rope_layers" in defaults:
        trial.put("no_rope_layers", [rng.randint(0, 1) for _ in range(NUM_LAYERS)])


def _drop(trial: Trial, defaults: dict[str, Any], rng: random.Random) -> None:
    names = [
        each
        for each in trial.raw
        if not re.fullmatch(
            r"model_type|vocab_size|.*hidden.*|.*layers?|n_embd|.*_id|.*heads?|n_positions|max.*|d_model|intermediate_size|ffn_dim|original.*|rope_parameters",
            each,
        )
    ]
    if names:
        dropped = rng.choice(names)
        del trial.raw[dropped]
        trial.changes.append(f"without {dropped}")


LAYOUTS = ("bfloat16", "pytorch_model.bin", "base")
"""How checkpoints are stored, too: in bfloat16, by torch.save, or without the head, whose weight is the embeddings'."""


def _save(model: Any, folder: Path, layout: str) -> None:
    from safetensors.torch import load_file, save_file

    tied = getattr(model, "all_tied_weights_keys", None)
    (model.base_model if layout == "base" and tied else model).save_pretrained(folder)
    path = folder / "model.safetensors"
    if layout == "bfloat16":
        save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    elif layout == "pytorch_model.bin":
        torch.save(load_file(path), folder / layout)
        path.unlink()


@torch.no_grad()
def run_trial(name: str, trial: Trial, rng: random.Random) -> str:
    """ "equal", "refused: ...", "untried: ..." where transformers cannot, or "DIFFERS: ..."."""
    from transformers import AutoConfig

    faint = rng.random() < 0.25
    with tempfile.TemporaryDirectory(prefix="fuzz") as where:
        folder = Path(where)
        (folder / "config.json").write_text(json.dumps(trial.raw))
        try:
            config = AutoConfig.from_pretrained(folder)
            implementation = "sdpa" if config.model_type == "falcon" else "eager"
            model = generating_class(config).from_config(config, attn_implementation=implementation).float().eval()
            fill_weights(model, rng.randint(0, 99), 0.05 if faint else 0.25)
            layout = rng.choice(("usual", "usual", "usual", *LAYOUTS))
            if layout == "bfloat16":
                for tensor in model.state_dict().values():
                    tensor.copy_(tensor.bfloat16())
            prompts = random_prompts(VOCAB_SIZE, LENGTHS, seed=rng.randint(0, 99))
            wanted = [model(torch.tensor([prompt]), use_cache=False).logits[0].float() for prompt in prompts]
        except Exception as error:  # a random configuration may be wrong in any way
            return f"untried: {type(error).__name__}: {str(error)[:100]}"
        if not all(bool(each.isfinite().all()) for each in wanted):
            return "untried: not finite"
        try:
            _save(model, folder, layout)
        except Exception as error:
            return f"untried: save {type(error).__name__}: {str(error)[:100]}"
        raw = trial.raw | {"architectures": [type(model).__name__]}
        (folder / "config.json").write_text(json.dumps(raw))
        try:
            from vllm.config.checkpoint.config import load_hf_config
            from vllm.models.registry import resolve_model_class

            parsed = load_hf_config(folder)
            resolved = resolve_model_class(parsed.architectures).resolve_config(parsed)
            length = min(128, resolved.max_context_len)
            if length < max(LENGTHS):
                prompts = [prompt for prompt in prompts if len(prompt) <= length]
                wanted = wanted[: len(prompts)]
            ours, _ = load_model(folder, max_model_len=length)
        except ValueError as error:
            return "refused: " + str(error).split(": ", 1)[-1][:150]
        except Exception as error:
            return f"FAILS: {type(error).__name__}: {str(error)[:200]} {traceback.format_exc()[-400:]}"
        try:
            got = paged_logits(ours, resolved, list(prompts), 7)
        except Exception as error:
            return f"FAILS: {type(error).__name__}: {str(error)[:200]} {traceback.format_exc()[-400:]}"
        spread = max(float(each.std()) for each in wanted)
        error = max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))
        if not error <= _TOLERANCE * max(spread, 1e-3) * (4 if spread > 0.2 else 1):
            return f"DIFFERS: by {error:.2g} of {spread:.2g}{' (faint)' if faint else ''}, {layout}"
        return "equal"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts: collections.Counter[str] = collections.Counter()
    for name in options.names or ARCHITECTURES:
        own: collections.Counter[str] = collections.Counter()
        for number in range(options.trials):
            rng = random.Random(f"{name} {options.seed} {number}")
            trial = make_trial(name, rng)
            result = run_trial(name, trial, rng)
            kind = result.split(":")[0]
            own[kind] += 1
            counts[result if kind in ("refused", "untried") else kind] += 1
            if kind in ("DIFFERS", "FAILS"):
                print(f"{name} #{number}: {result}\n    {', '.join(trial.changes)}", flush=True)
            elif kind == "refused":
                print(f"{name} #{number}: {result}", flush=True)
        print(f"{name}: {dict(own)}", flush=True)
    for result, count in counts.most_common():
        print(count, result)


if __name__ == "__main__":
    main()
