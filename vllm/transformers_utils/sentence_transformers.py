"""What the files of a sentence-transformers folder say about pooling. Nothing here needs torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

# In the order in which several are joined.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer after the pooling; `activation` is torch's class name."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class SentencePooling:
    """From hidden states to an embedding.

    Attributes:
        modes: ways of pooling, whose results are joined.
        dense: layers that follow.
        normalize: whether the result has length 1.
        of_tokens: late interaction: tokens are not pooled, and each is projected by the layers.
    """

    modes: tuple[str, ...] = ("cls",)
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = True
    of_tokens: bool = False

    def reads_all_tokens(self, task: str | None) -> bool:
        """Whether more than the last token's hidden state is pooled."""
        return str(task).startswith("token_") or self.modes != ("lasttoken",)


def read_pooling(folder: Path) -> SentencePooling | None:
    """What modules.json says; None without one.

    Raises:
        ValueError: a module or a mode that is not known.
    """
    modules = _read(folder / "modules.json")
    if modules is None:
        return None
    modes: tuple[str, ...] = ()
    dense: list[DenseLayer] = []
    normalize = False
    for module in modules:
        kind, place = module["type"].rpartition(".")[2], folder / module["path"]
        if kind == "Pooling":
            modes = _modes(place)
        elif normalize:
            raise ValueError(f"{folder.name}/modules.json: {kind} after Normalize is not supported")
        elif kind == "Dense":
            dense.append(_dense(place))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ValueError(f"{folder.name}/modules.json: the module {module['type']} is not supported")
    if dense and not modes:
        return SentencePooling(("cls",), tuple(dense), True, of_tokens=True)
    return SentencePooling(modes or ("mean",), tuple(dense), normalize)


def classifier_activation(raw: dict[str, Any]) -> str | None:
    """The activation of a cross-encoder's logits by config.json's content: "identity", "sigmoid" or "softmax"; None: it
    does not say.

    Raises:
        ValueError: it is another one.
    """
    named = (raw.get("sentence_transformers") or {}).get("activation_fn")
    named = named or raw.get("sbert_ce_default_activation_function")
    if named is None:
        return None
    activation = str(named).rpartition(".")[2].lower()
    if activation not in ("identity", "sigmoid", "softmax"):
        raise ValueError(f"config.json: the activation {named} of its scores is not supported")
    return activation


def warn_of_unread(folder: Path) -> None:
    """Say what of the folder's settings changes nothing here.

    Raises:
        ValueError: texts would have to be changed before they are tokenised.
    """
    settings, where = _settings(folder)
    if settings.get("do_lower_case"):
        tokenizer = _read(folder / "tokenizer_config.json") or {}
        if not tokenizer.get("do_lower_case"):
            raise ValueError(
                f"{where}: do_lower_case is not supported where the tokenizer does not "
                "do it; set it in tokenizer_config.json"
            )
    config = _read(folder / "config_sentence_transformers.json") or {}
    name = config.get("default_prompt_name")
    if name is not None:
        prompt = (config.get("prompts") or {}).get(name)
        logger.warning("default_prompt_name=%s is not applied: begin texts with %r yourself", name, prompt)
    if config.get("similarity_fn_name") not in (None, "cosine"):
        logger.warning("similarity_fn_name=%s: scores of embeddings are cosines here", config["similarity_fn_name"])


def named_prompts(folder: Path) -> dict[str, str]:
    """What the model's authors put before texts, by the name of a purpose; {} where they say nothing."""
    own = (_read(folder / "config.json") or {}).get("task_instructions")
    prompts = own or (_read(folder / "config_sentence_transformers.json") or {}).get("prompts") or {}
    return {str(name): str(prompt) for name, prompt in prompts.items()}


def sentence_length(folder: Path) -> int | None:
    """The longest text in tokens by sentence_bert_config.json; None: it does not say."""
    return _settings(folder)[0].get("max_seq_length")


def _settings(folder: Path) -> tuple[dict[str, Any], str]:
    """sentence_bert_config.json, which older folders name after another kind of model, and its name."""
    path = next(iter(sorted(folder.glob("sentence_*_config.json"))), None)
    return ({}, "") if path is None else (_read(path), f"{folder.name}/{path.name}")


def _modes(place: Path) -> tuple[str, ...]:
    config = _read(place / "config.json") or {}
    given = config.get("pooling_mode")
    modes = tuple(mode for name, mode in _MODES.items() if config.get(name))
    if given is not None:
        modes = (given,) if isinstance(given, str) else tuple(given)
    unknown = set(modes) - set(_MODES.values())
    if unknown or config.get("include_prompt") is False:
        what = f"pooling_mode {min(unknown)!r}" if unknown else "include_prompt=false"
        raise ValueError(f"{place.name}/config.json: {what} is not supported")
    return modes


def _dense(place: Path) -> DenseLayer:
    config = _read(place / "config.json") or {}
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    return DenseLayer(place, config["in_features"], config["out_features"], config.get("bias", True), activation)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
