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

ACTIVATIONS = ("identity", "sigmoid", "softmax", "tanh")


@dataclass(frozen=True)
class PoolingLayer:
    """What follows the pooling.

    Attributes:
        kind: "Dense", "LayerNorm" or "Normalize".
        outputs: None: as many as inputs.
        activation: of a dense layer, torch's class name.
        is_residual: whether a dense layer adds its input, or a projection of it, to its output.
    """

    kind: str
    folder: Path
    inputs: int = 0
    outputs: int | None = None
    bias: bool = True
    activation: str = "Identity"
    is_residual: bool = False


@dataclass(frozen=True)
class SentencePooling:
    """From hidden states to an embedding.

    Attributes:
        modes: ways of pooling, whose results are joined.
        layers: what follows.
        normalize: whether the result has length 1.
        of_tokens: late interaction: tokens are not pooled, and each goes through the layers.
    """

    modes: tuple[str, ...] = ("cls",)
    layers: tuple[PoolingLayer, ...] = ()
    normalize: bool = True
    of_tokens: bool = False

    def reads_all_tokens(self, task: str | None) -> bool:
        """Whether more than the last token's hidden state is pooled."""
        return str(task).startswith("token_") or self.modes != ("lasttoken",)

    def size(self, hidden_size: int) -> int:
        """Of an embedding, or of a token's."""
        sizes = [layer.outputs for layer in self.layers if layer.outputs is not None]
        return sizes[-1] if sizes else hidden_size * len(self.modes)


@dataclass(frozen=True)
class PairMessages:
    """How a cross-encoder puts a pair of texts into its tokenizer's chat template, as messages of the roles query and
    document.

    Attributes:
        template: a name among the tokenizer's chat templates; None: the usual one.
        arguments: the template's.
        is_structured: whether a message's content is a list of parts in place of a text.
        system: the text of a message before them; "" for none.
        token_ids: of a model that generates the positive answer and the negative one; empty: it classifies.
    """

    template: str | None
    arguments: dict[str, Any]
    is_structured: bool
    system: str
    token_ids: tuple[int, ...]


# Of the settings of a chat template, those that are not the template's.
_NO_ARGUMENTS = {"restore_suffix", "truncation", "max_length", "padding", "pad_to_multiple_of", "return_tensors"}


def read_pair_messages(folder: Path) -> PairMessages | None:
    """What a CrossEncoder's folder says; None: it joins texts without a chat template, or is none.

    Raises:
        ValueError: its score is one token's logit.
    """
    own = read_json(folder / "config_sentence_transformers.json") or {}
    modules = read_json(folder / "modules.json") or ()
    if own.get("model_type") != "CrossEncoder" or not modules:
        return None
    settings = transformer_settings(folder)[0]
    message = (settings.get("modality_config") or {}).get("message")
    if message is None:
        return None
    token_ids: tuple[int, ...] = ()
    for module in modules:
        if module["type"].endswith(".LogitScore"):
            score = read_json(folder / module["path"] / "config.json") or {}
            if score.get("false_token_id") is None:
                raise ValueError(f"{folder.name}: a LogitScore without false_token_id is not supported")
            token_ids = (score["true_token_id"], score["false_token_id"])
    arguments = dict((settings.get("processing_kwargs") or {}).get("chat_template") or {})
    template = arguments.pop("chat_template", None)
    arguments = {name: value for name, value in arguments.items() if name not in _NO_ARGUMENTS}
    return PairMessages(template, arguments, message.get("format") == "structured", default_prompt(folder), token_ids)


def read_pooling(folder: Path) -> SentencePooling | None:
    """What modules.json says; None without one, and where it is of a model that generates.

    Raises:
        ValueError: a module or a mode that is not known.
    """
    modules = read_json(folder / "modules.json")
    if modules is None:
        return None
    modes: tuple[str, ...] = ()
    layers: list[PoolingLayer] = []
    of_tokens = False
    for module in modules:
        kind, place = module["type"].rpartition(".")[2], folder / module["path"]
        if kind == "Pooling":
            if layers:
                raise ValueError(f"{folder.name}/modules.json: {layers[0].kind} before the pooling is not supported")
            modes = _modes(place)
        elif kind == "Dense":
            layers.append(_dense(place))
        elif kind in ("LayerNorm", "Normalize"):
            layers.append(PoolingLayer(kind, place))
        elif kind == "LogitScore":
            return None
        elif kind == "MultiVectorMask":
            of_tokens = True
        elif kind not in ("Transformer", "Dropout"):
            raise ValueError(f"{folder.name}/modules.json: the module {module['type']} is not supported")
    normalize = bool(layers) and layers[-1].kind == "Normalize"
    last = tuple(layers[:-1] if normalize else layers)
    if of_tokens or (last and not modes):
        return SentencePooling(("cls",), last, normalize or not of_tokens, of_tokens=True)
    return SentencePooling(modes or ("mean",), last, normalize)


def classifier_activation(folder: Path, raw: dict[str, Any]) -> str | None:
    """The activation of a cross-encoder's logits by its folder and config.json's content: one of ACTIVATIONS; None:
    they do not say.

    Raises:
        ValueError: it is another one.
    """
    own = read_json(folder / "config_sentence_transformers.json") or {}
    named = own.get("activation_fn") or (raw.get("sentence_transformers") or {}).get("activation_fn")
    named = named or raw.get("sbert_ce_default_activation_function")
    if named is None:
        return None
    activation = str(named).rpartition(".")[2].lower()
    if activation not in ACTIVATIONS:
        raise ValueError(f"{folder.name}: the activation {named} of its scores is not supported")
    return activation


def warn_of_unread(folder: Path) -> None:
    """Say what of the folder's settings changes nothing here.

    Raises:
        ValueError: texts would have to be changed before they are tokenised.
    """
    settings, where = transformer_settings(folder)
    if settings.get("do_lower_case"):
        tokenizer = read_json(folder / "tokenizer_config.json") or {}
        if not tokenizer.get("do_lower_case"):
            raise ValueError(
                f"{where}: do_lower_case is not supported where the tokenizer does not "
                "do it; set it in tokenizer_config.json"
            )
    config = read_json(folder / "config_sentence_transformers.json") or {}
    prompt = default_prompt(folder)
    if prompt and _leaves_out_prompts(folder):
        raise ValueError(f"{folder.name}: include_prompt=false is not supported with default_prompt_name")
    if str(config.get("similarity_fn_name")).lower() not in ("none", "cosine", "maxsim", "meanmaxsim"):
        logger.warning("similarity_fn_name=%s: scores of embeddings are cosines here", config["similarity_fn_name"])


def named_prompts(folder: Path) -> dict[str, str]:
    """What the model's authors put before texts, by the name of a purpose; {} where they say nothing, or where prompts
    are not pooled (include_prompt=false)."""
    own = (read_json(folder / "config.json") or {}).get("task_instructions")
    prompts = own or (read_json(folder / "config_sentence_transformers.json") or {}).get("prompts") or {}
    return {} if _leaves_out_prompts(folder) else {str(name): str(prompt) for name, prompt in prompts.items()}


def default_prompt(folder: Path) -> str:
    """What is put before texts that are embedded where nothing is asked for: that of default_prompt_name."""
    config = read_json(folder / "config_sentence_transformers.json") or {}
    return str((config.get("prompts") or {}).get(config.get("default_prompt_name")) or "")


def default_pair_prompt(folder: Path) -> str:
    """The default prompt of a CrossEncoder's folder, which stands before the query; "" of a folder for embeddings."""
    own = read_json(folder / "config_sentence_transformers.json") or {}
    return default_prompt(folder) if own.get("model_type") == "CrossEncoder" else ""


def with_prompt(text: Any, prompt: str) -> Any:
    """A text that begins with the prompt; what is no text, or empty, as it is."""
    if not isinstance(text, str) or not text or text.startswith(prompt):
        return text
    return prompt + text


def _leaves_out_prompts(folder: Path) -> bool:
    places = [each["path"] for each in read_json(folder / "modules.json") or () if each["type"].endswith(".Pooling")]
    return any((read_json(folder / place / "config.json") or {}).get("include_prompt") is False for place in places)


def sentence_length(folder: Path) -> int | None:
    """The longest text in tokens: by sentence_bert_config.json, else by the tokenizer of such a folder; None: neither
    says it."""
    length = transformer_settings(folder)[0].get("max_seq_length")
    if length is None and (folder / "modules.json").is_file():
        length = (read_json(folder / "tokenizer_config.json") or {}).get("model_max_length")
    # Tokenizers without a limit have a very large one.
    return int(length) if isinstance(length, int | float) and 0 < length < 2**31 else None


def transformer_settings(folder: Path) -> tuple[dict[str, Any], str]:
    """sentence_bert_config.json, which older folders name after another kind of model, and its name."""
    path = next(iter(sorted(folder.glob("sentence_*_config.json"))), None)
    return ({}, "") if path is None else (read_json(path), f"{folder.name}/{path.name}")


def _modes(place: Path) -> tuple[str, ...]:
    config = read_json(place / "config.json") or {}
    given = config.get("pooling_mode")
    modes = tuple(mode for name, mode in _MODES.items() if config.get(name))
    if given is not None:
        modes = (given,) if isinstance(given, str) else tuple(given)
    unknown = set(modes) - set(_MODES.values())
    if unknown:
        raise ValueError(f"{place.name}/config.json: pooling_mode {min(unknown)!r} is not supported")
    return modes


def _dense(place: Path) -> PoolingLayer:
    config = read_json(place / "config.json") or {}
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    sizes = config["in_features"], config["out_features"], config.get("bias", True)
    return PoolingLayer("Dense", place, *sizes, activation, bool(config.get("use_residual")))


def read_json(path: Path) -> Any:
    """A file's content; None: there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
