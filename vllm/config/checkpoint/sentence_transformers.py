"""Pooling as the files of a sentence-transformers folder describe it. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config.checkpoint.sentence_files import (
    OWN_SETTINGS,
    Module,
    own_settings,
    part_of,
    read_modules,
    read_object,
    transformer_settings,
)
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

SPARSE_ENDING = "SpladeSparseEmbeddingModel"
"""The ending of architectures that embed by their heads of masked words: upstream's name of BERT's."""

TOKEN_HEADS = "BgeM3EmbeddingModel"
"""Upstream's name of an XLM-RoBERTa with layers on single tokens."""

_MODELS = ("Transformer", "CLIPModel")

ACTIVATIONS = ("identity", "sigmoid", "softmax", "tanh")


@dataclass(frozen=True)
class PoolingLayer:
    """A layer that follows the pooling.

    Attributes:
        kind: "Dense", "LayerNorm" or "Normalize".
        outputs: None: as many as inputs.
        activation: of a dense layer, torch's class name.
        is_residual: whether a dense layer adds its input, or a projection of it, to its output.
        prefix: the beginning of its weights' names, where they are in the model's own files.
    """

    kind: str
    folder: Path
    inputs: int = 0
    outputs: int | None = None
    bias: bool = True
    activation: str = "Identity"
    is_residual: bool = False
    prefix: str = ""


@dataclass(frozen=True)
class SparsePooling:
    """From the logits of each token's words to a weight of each word: log(1 + max(logit, 0)), then over tokens.

    Attributes:
        strategy: "max" or "sum" over the tokens.
        is_flat: whether a second log(1 + x) follows.
        size: of the vocabulary.
    """

    strategy: str = "max"
    is_flat: bool = False
    size: int = 0


@dataclass(frozen=True)
class SentencePooling:
    """From hidden states to an embedding.

    Attributes:
        modes: ways of pooling, whose results are joined.
        layers: what follows.
        normalize: whether the result has length 1.
        of_tokens: late interaction: tokens are not pooled, and each goes through the layers.
        sparse: in place of all that, how words are pooled; None: they are not.
        has_token_heads: whether tokens have weights and vectors of their own, as BGE-M3's.
    """

    modes: tuple[str, ...] = ("cls",)
    layers: tuple[PoolingLayer, ...] = ()
    normalize: bool = True
    of_tokens: bool = False
    sparse: SparsePooling | None = None
    has_token_heads: bool = False

    def check(self, hidden_size: int, name: str) -> None:
        """ValueError: a Dense layer takes another number of values than there are; `name` is the folder's."""
        size = hidden_size * (1 if self.of_tokens else len(self.modes))
        for layer in self.layers:
            if layer.kind == "Dense" and layer.inputs != size:
                raise ValueError(
                    f"{name}/{layer.folder.name}/config.json: in_features must be {size}, what comes before, "
                    f"got {layer.inputs}"
                )
            size = layer.outputs or size

    def reads_all_tokens(self, task: str | None) -> bool:
        """Whether more than the last token's hidden state is pooled."""
        return str(task).startswith("token_") or self.modes != ("lasttoken",)

    def size(self, hidden_size: int) -> int:
        """Length of an embedding, or of a token's."""
        if self.sparse is not None:
            return self.sparse.size
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
        token_ids: of a model that generates the positive answer and the negative one, or the former alone; empty: it
            classifies.
        gives_logits: whether a generating model's scores are logits, not their logistic function.
    """

    template: str | None
    arguments: dict[str, Any]
    is_structured: bool
    system: str
    token_ids: tuple[int, ...]
    gives_logits: bool = False


# A tokenizer's settings that change no token of texts that are short enough.
_CUTTING = {"truncation", "max_length", "padding", "padding_side", "pad_to_multiple_of", "return_tensors"}
# Values of others that change no token either. None is the tokenizer's own.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "is_split_into_words": (False, None),
    "return_attention_mask": (True, None),
    "return_length": (False, None),
    "return_offsets_mapping": (False, None),
    "return_overflowing_tokens": (False, None),
    "return_special_tokens_mask": (False, None),
    "return_token_type_ids": (True, False, None),
    "stride": (0, None),
    "truncation_side": ("right", None),
    "verbose": (True, False, None),
}
# Settings of a chat template that are not the template's.
_NO_ARGUMENTS = _CUTTING | {"restore_suffix"}
# Where the settings of a tokenizer are; the first one wins.
_TOKENIZING = ("text", "common")


def read_pair_messages(folder: Path) -> PairMessages | None:
    """Read a CrossEncoder's folder; None: it joins texts without a chat template, or is none.

    Raises:
        ValueError: a setting is not supported, or of another kind.
    """
    modules = read_modules(folder)
    if own_settings(folder).get("model_type") != "CrossEncoder" or not modules:
        return None
    settings, where = transformer_settings(folder)
    modalities = part_of(settings, "modality_config", where)
    if "message" not in modalities:
        return None
    message = part_of(modalities, "message", where)
    _check_processing(settings, where)
    token_ids: tuple[int, ...] = ()
    for module in modules:
        if module.kind == "LogitScore":
            names = [
                "true_token_id",
                *(["false_token_id"] if module.settings.get("false_token_id") is not None else []),
            ]
            token_ids = tuple(module.integer(name) for name in names)
            if len(set(token_ids)) < len(token_ids):
                raise ValueError(f"{module.where}: true_token_id and false_token_id are both {token_ids[0]}")
    arguments = dict(part_of(part_of(settings, "processing_kwargs", where), "chat_template", where))
    template = arguments.pop("chat_template", None)
    arguments = {name: value for name, value in arguments.items() if name not in _NO_ARGUMENTS}
    activation = classifier_activation(folder, {}) if token_ids else None
    if activation not in (None, "sigmoid", "identity"):
        raise ValueError(f"{folder.name}: activation_fn {activation} of a LogitScore is not supported")
    is_structured, gives_logits = message.get("format") == "structured", activation == "identity"
    return PairMessages(template, arguments, is_structured, default_prompt(folder), token_ids, gives_logits)


def read_pooling(folder: Path) -> SentencePooling | None:
    """Read modules.json; None without one, and where it is of a model that generates.

    Raises:
        ValueError: a module or a mode that is not known, or a setting that is not what it must be.
    """
    modules, where = read_modules(folder), f"{folder.name}/modules.json"
    if modules is None:
        return None
    if has_sparse_pooling(folder):
        return SentencePooling(normalize=False, sparse=_sparse(modules, where))
    modes: tuple[str, ...] = ()
    layers: list[PoolingLayer] = []
    of_tokens = False
    for module in modules:
        kind = module.kind
        if kind == "Pooling":
            if own_settings(folder).get("model_type") == "CrossEncoder":
                raise ValueError(f"{where}: a cross-encoder with a pooling of its own (Pooling) is not supported")
            if layers or modes:
                before = layers[0].kind if layers else kind
                raise ValueError(f"{where}: {before} before the pooling is not supported")
            modes = _modes(module)
        elif kind == "Dense":
            layers.append(_dense(module))
        elif kind in ("LayerNorm", "Normalize"):
            layers.append(PoolingLayer(kind, module.folder))
        elif kind == "LogitScore":
            return None
        elif kind == "MultiVectorMask":
            of_tokens = True
        elif kind not in (*_MODELS, "Dropout"):
            raise ValueError(f"{where}: the module {module.type} is not supported")
        if modes and kind in ("Dense", "Normalize"):
            _check_reads_pooled(module)
    if [module.kind in _MODELS for module in modules] != [True, *[False] * (len(modules) - 1)]:
        raise ValueError(f"{where}: the first module, and no other, must be a Transformer")
    if modules[0].kind == "CLIPModel" and [each.kind for each in modules[1:]] not in ([], ["Normalize"]):
        raise ValueError(f"{where}: only Normalize is supported after a CLIPModel")
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
    own = own_settings(folder)
    named = own.get("activation_fn") or (raw.get("sentence_transformers") or {}).get("activation_fn")
    named = named or raw.get("sbert_ce_default_activation_function")
    if named is None:
        return None
    activation = str(named).rpartition(".")[2].lower()
    if activation not in ACTIVATIONS:
        raise ValueError(f"{folder.name}: the activation {named} of its scores is not supported")
    return activation


def check_settings(folder: Path) -> None:
    """Check the folder's settings of texts and of their embeddings, and say which of them changes nothing here.

    Raises:
        ValueError: texts would have to be changed before they are tokenised, or tokenised otherwise.
    """
    settings, where = transformer_settings(folder)
    if settings.get("do_lower_case"):
        tokenizer = read_object(folder / "tokenizer_config.json") or {}
        if not tokenizer.get("do_lower_case"):
            raise ValueError(
                f"{where}: do_lower_case is not supported where the tokenizer does not "
                "do it; set it in tokenizer_config.json"
            )
    config, has_message = own_settings(folder), "message" in part_of(settings, "modality_config", where)
    is_cross_encoder = config.get("model_type") == "CrossEncoder"
    _check_processing(settings, where, joins_pairs=is_cross_encoder and not has_message)
    if has_message and not is_cross_encoder:
        raise ValueError(
            f"{where}: message in modality_config, a chat template around each embedded text, is not supported: if the "
            "model was trained on plain texts, remove message there"
        )
    prompt = default_prompt(folder)
    if prompt and _leaves_out_prompts(folder):
        raise ValueError(f"{folder.name}: include_prompt=false is not supported with default_prompt_name")
    if str(config.get("similarity_fn_name")).lower() not in ("none", "cosine", "maxsim", "meanmaxsim"):
        logger.warning("similarity_fn_name=%s: scores of embeddings are cosines here", config["similarity_fn_name"])


def _check_processing(settings: dict[str, Any], where: str, joins_pairs: bool = False) -> None:
    """ValueError: texts, or pairs that the tokenizer joins, are tokenised in a way that is not supported."""
    processing = part_of(settings, "processing_kwargs", where)
    # A single text's types are 0 with and without them.
    neutral = _NEUTRAL | ({"return_token_type_ids": (True, None)} if joins_pairs else {})
    for name in _TOKENIZING:
        for field, value in sorted(part_of(processing, name, where).items()):
            # That last one is for the model, of whose logits the last ones are read.
            if field in _CUTTING or field == "logits_to_keep" or value in neutral.get(field, ()):
                continue
            changes = f"; {neutral[field][0]!r} is" if field in neutral else ""
            raise ValueError(f"{where}: {field}={value!r} in {name} of processing_kwargs is not supported{changes}")


def named_prompts(folder: Path) -> dict[str, str]:
    """The prompts that the model's authors put before texts, by the name of a purpose; {} where they say nothing, or
    where prompts are not pooled (include_prompt=false)."""
    own = (read_object(folder / "config.json") or {}).get("task_instructions")
    prompts = own or part_of(own_settings(folder), "prompts", f"{folder.name}/{OWN_SETTINGS}")
    return {} if _leaves_out_prompts(folder) else {str(name): str(prompt) for name, prompt in prompts.items()}


def default_prompt(folder: Path) -> str:
    """The prompt before texts that are embedded where nothing is asked for: that of default_prompt_name. ValueError:
    there is no such prompt."""
    config, where = own_settings(folder), f"{folder.name}/{OWN_SETTINGS}"
    prompts, name = part_of(config, "prompts", where), config.get("default_prompt_name")
    # These two are empty where they are not given.
    if name is not None and name not in (*prompts, "query", "document"):
        raise ValueError(f"{where}: default_prompt_name={name!r} is none of prompts: {', '.join(prompts) or 'none'}")
    return str(prompts.get(str(name)) or "")


def default_pair_prompt(folder: Path) -> str:
    """The default prompt of a CrossEncoder's folder, which stands before the query; "" of a folder for embeddings."""
    own = own_settings(folder)
    return default_prompt(folder) if own.get("model_type") == "CrossEncoder" else ""


def with_prompt(text: Any, prompt: str) -> Any:
    """A text that begins with the prompt; what is no text, or empty, as it is."""
    if not isinstance(text, str) or not text or text.startswith(prompt):
        return text
    return prompt + text


def _leaves_out_prompts(folder: Path) -> bool:
    poolings = [each for each in read_modules(folder) or () if each.kind == "Pooling"]
    return any((each.config or {}).get("include_prompt") is False for each in poolings)


def sentence_length(folder: Path) -> int | None:
    """The longest text in tokens: by sentence_bert_config.json, where processing_kwargs win, else by the tokenizer of
    such a folder; None: neither says it. ValueError: the former says what is no length."""
    settings, where = transformer_settings(folder)
    processing = part_of(settings, "processing_kwargs", where)
    parts: tuple[str, ...] = _TOKENIZING
    if "message" in part_of(settings, "modality_config", where):
        parts = ("chat_template", *parts)
    said = {
        f"max_length in {name} of processing_kwargs": part_of(processing, name, where).get("max_length")
        for name in parts
    }
    said["max_seq_length"] = settings.get("max_seq_length")
    for name, value in said.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{where}: {name} must be a positive integer, got {value!r}")
    length = next((each for each in said.values() if each is not None), None)
    if length is None and (folder / "modules.json").is_file():
        length = (read_object(folder / "tokenizer_config.json") or {}).get("model_max_length")
    # Tokenizers without a limit have a very large one.
    return int(length) if isinstance(length, int | float) and 0 < length < 2**31 else None


def is_sparse(architectures: Sequence[str]) -> bool:
    """Whether a model's embeddings have a number for each token of the vocabulary."""
    return any(name.endswith(SPARSE_ENDING) for name in architectures[:1])


def has_sparse_pooling(folder: Path) -> bool:
    """Whether the folder is a SparseEncoder's that pools words."""
    return any(module.kind == "SpladePooling" for module in read_modules(folder) or ())


def _sparse(modules: list[Module], where: str) -> SparsePooling:
    kinds = [module.kind for module in modules]
    if kinds not in (["Transformer", "SpladePooling"], ["MLMTransformer", "SpladePooling"]):
        raise ValueError(f"{where}: SpladePooling must follow a Transformer alone, got {', '.join(kinds)}")
    pooling = modules[1]
    for name, known in (("pooling_strategy", ("max", "sum")), ("activation_function", ("relu", "log1p_relu"))):
        if pooling.settings.get(name) not in (None, *known):
            raise ValueError(f"{pooling.where}: {name} must be {' or '.join(known)}, got {pooling.settings[name]!r}")
    strategy, activation = (pooling.settings.get(name) for name in ("pooling_strategy", "activation_function"))
    return SparsePooling(strategy or "max", activation == "log1p_relu")


def _modes(module: Module) -> tuple[str, ...]:
    config, where = module.settings, module.where
    asked = {name for name, value in config.items() if name.startswith("pooling_mode_") and value}
    if unknown := asked - _MODES.keys():
        raise ValueError(f"{where}: {min(unknown)} is not supported: it must be one of {', '.join(_MODES)}")
    given = config.get("pooling_mode")
    modes = [mode for name, mode in _MODES.items() if name in asked] or ["mean"]
    if given is not None:
        modes = given if isinstance(given, list) else [given]
    known = list(_MODES.values())
    if not modes or not all(mode in known for mode in modes):
        raise ValueError(f"{where}: pooling_mode {given!r} is not supported: it must be of {', '.join(known)}")
    return tuple(modes)


def _dense(module: Module) -> PoolingLayer:
    activation = module.settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not isinstance(activation, str):
        raise ValueError(f"{module.where}: activation_function must be a class's name, got {activation!r}")
    sizes = module.integer("in_features", 1), module.integer("out_features", 1), module.flag("bias", True)
    name, is_residual = activation.rpartition(".")[2], module.flag("use_residual", False)
    return PoolingLayer("Dense", module.folder, *sizes, name, is_residual)


def _check_reads_pooled(module: Module) -> None:
    for name in ("module_input_name", "module_output_name"):
        value = (module.config or {}).get(name)
        if value not in (None, "sentence_embedding"):
            raise ValueError(
                f"{module.where}: {name}={value!r} is not supported after a pooling: it must be 'sentence_embedding'"
            )
