"""Architectures by the name that config.json gives them. A model's module is imported when it is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from vllm.config.checkpoint.sentence_transformers import SPARSE_ENDING, TOKEN_HEADS, is_sparse
from vllm.logger import init_logger

if TYPE_CHECKING:
    from torch import nn

logger = init_logger(__name__)

# Decoders, by their module in `dense/`.
_DENSE = {
    "apertus": "ApertusForCausalLM",
    "baichuan": "BaichuanForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "bloom": "BloomForCausalLM",
    "chatglm": "ChatGLMForConditionalGeneration",
    "cohere": "Cohere2ForCausalLM CohereForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "gemma": "Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM VaultGemmaForCausalLM",
    "gemma3n": "Gemma3nForCausalLM",
    "gemma4": "Gemma4ForCausalLM Gemma4UnifiedForCausalLM",
    "glm": "Glm4ForCausalLM GlmForCausalLM",
    "gpt2": "GPT2LMHeadModel GPTBigCodeForCausalLM GPTNeoForCausalLM OpenAIGPTLMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM",
    "gptj": "CodeGenForCausalLM GPTJForCausalLM",
    "granite": "GraniteForCausalLM GraniteSWAForCausalLM HyperCLOVAXForCausalLM",
    "internlm": "InternLM2ForCausalLM InternLM3ForCausalLM InternLMForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "llama": (
        "ArceeForCausalLM CwmForCausalLM Ernie4_5ForCausalLM HeliumForCausalLM HunYuanDenseV1ForCausalLM "
        "LlamaForCausalLM MiniCPMForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM"
    ),
    "minicpm3": "MiniCPM3ForCausalLM",
    "mistral": "Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM",
    "mpt": "MPTForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM",
    "opt": "OPTForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phi": "Phi3ForCausalLM PhiForCausalLM",
    "qwen": "MiMoForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "xglm": "BioGptForCausalLM XGLMForCausalLM",
    "youtu": "YoutuForCausalLM",
}
# Decoders with experts, by their module in `mixtures/`.
_MIXTURES = {
    "afmoe": "AfmoeForCausalLM",
    "aria": "AriaTextForCausalLM",
    "cohere": "Cohere2MoeForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "deepseek": "Dots1ForCausalLM ExaoneMoeForCausalLM Glm4MoeForCausalLM SolarOpenForCausalLM",
    "ernie": "Ernie4_5_MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteMoeForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM",
    "hunyuan": "HYV3ForCausalLM HunYuanMoEV1ForCausalLM",
    "indexed": "DeepseekV32ForCausalLM GlmMoeDsaForCausalLM",
    "jetmoe": "JetMoeForCausalLM",
    "kolibri": "Kolibri1ForCausalLM",
    "laguna": "LagunaForCausalLM",
    "latent": "AXK1ForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM Mistral4ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "longcat": "LongcatFlashForCausalLM",
    "mimo": "MiMoV2FlashForCausalLM",
    "minimax": "MiniMaxM2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo": "FlexOlmoForCausalLM OlmoeForCausalLM",
    "phi": "PhimoeForCausalLM",
    "qwen": "FlintForCausalLM MellumForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM",
}
# Decoders with recurrent states, by their module in `hybrids/`.
_HYBRIDS = {
    "bailing": "BailingHybridForCausalLM",
    "bamba": "BambaForCausalLM",
    "falcon": "FalconH1ForCausalLM",
    "gemma": "RecurrentGemmaForCausalLM",
    "granite": "GraniteMoeHybridForCausalLM",
    "kimi": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM",
    "jamba": "JambaForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "mamba": "FalconMambaForCausalLM Mamba2ForCausalLM MambaForCausalLM",
    "nemotron": "NemotronHForCausalLM",
    "olmo": "OlmoHybridForCausalLM",
    "qwen": "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "xlstm": "xLSTMForCausalLM",
    "zamba": "Zamba2ForCausalLM ZambaForCausalLM",
}
# Other names of these.
_SYNONYMS = {
    "AquilaForCausalLM": "LlamaForCausalLM",
    "BaiChuanForCausalLM": "BaichuanForCausalLM",
    "ChatGLMModel": "ChatGLMForConditionalGeneration",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MptForCausalLM": "MPTForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "RWForCausalLM": "FalconForCausalLM",
    "StableLMEpochForCausalLM": "StableLmForCausalLM",
    "XverseForCausalLM": "LlamaForCausalLM",
}
_NATIVE = {
    name: f"vllm.models.{folder}.{module}:{name}"
    for folder, table in (("dense", _DENSE), ("mixtures", _MIXTURES), ("hybrids", _HYBRIDS))
    for module, names in table.items()
    for name in names.split()
}
_NATIVE |= {name: _NATIVE[known] for name, known in _SYNONYMS.items()}

# Encoders, whose requests are not sampled: of a family the class, and the endings of its architectures' names.
_ENDINGS_OF_ENCODERS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_ENCODERS = {
    "Bert": "bert:BertModel",
    "DistilBert": "distilbert:DistilBertModel",
    "Gte": "gte:GteModel",
    "GteNew": "gte:GteModel",
    "JinaEmbeddingsV3": "jina_roberta:JinaRobertaModel",
    "ModernBert": "modernbert:ModernBertModel",
    "New": "gte:GteModel",
    "NomicBert": "nomic_bert:NomicBertModel",
    "Roberta": "bert:RobertaModel",
    "XLMRoberta": "bert:RobertaModel",
}
_OTHER_ENCODERS = {
    TOKEN_HEADS: "bert:RobertaModel",
    "HF_ColBERT": "bert:BertModel",
    "ColBERTModel": "bert:BertModel",
    "ColBERTJinaRobertaModel": "jina_roberta:JinaRobertaModel",
    "ColBERTModernBertModel": "modernbert:ModernBertModel",
    "JinaBertModel": "jina_bert:JinaBertModel",
    "JinaBertForMaskedLM": "jina_bert:JinaBertModel",
    "JinaBertForSequenceClassification": "jina_bert:JinaBertModel",
}
PAIR = "vllm.models.vision.pair:PairEmbedder"
"""The entry of PAIRS."""
PAIRS = ("CLIPModel", "Siglip2Model", "SiglipModel")
"""Models that make one vector of a text or a picture."""
_WITH_WORDS = ("Bert", "DistilBert", "ModernBert", "Roberta", "XLMRoberta")
_POOLING = {
    name: f"vllm.models.encoders.{entry}"
    for name, entry in (
        _OTHER_ENCODERS
        | {family + ending: entry for family, entry in _ENCODERS.items() for ending in _ENDINGS_OF_ENCODERS}
        | {family + SPARSE_ENDING: _ENCODERS[family] for family in _WITH_WORDS}
    ).items()
} | dict.fromkeys(PAIRS, PAIR)
# position_embedding_type="rotary" makes another architecture of one: Jina's models bear the names of others.
_ROTARY = {
    "HF_ColBERT": "ColBERTJinaRobertaModel",
    **{f"XLMRoberta{ending}": f"JinaEmbeddingsV3{ending}" for ending in _ENDINGS_OF_ENCODERS},
}


# The ending of an architecture's name says what its results are; "embed": hidden states. Reward models are token
# classifiers with a hidden layer.
_ENDINGS = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForProcessRewardModel": "reward",
    "ForRewardModel": "reward",
    "Model": "embed",
}


def encoder_archs() -> AbstractSet[str]:
    """Names in config.json of the encoders that have a model here."""
    return _POOLING.keys()


def pooling_kind(architectures: Sequence[str]) -> str | None:
    """The task that a model is made for, by the first name: "embed", "token_embed" (late interaction), "classify",
    "token_classify" or "reward"; None: text."""
    if ModelRegistry.find(architectures) is not None:
        return None
    if any("ColBERT" in name for name in architectures[:1]):
        return "token_embed"
    return next((_ENDINGS[each] for name in architectures[:1] if (each := _ending(name))), None)


def with_sparse_head(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """config.json's content for a folder whose modules pool words: the architecture is that of sparse embeddings.

    Raises:
        ValueError: there is none for this encoder.
    """
    names = list(raw.get("architectures") or ())
    if is_sparse(names):
        return raw
    sparse = [name.removesuffix("ForMaskedLM") + SPARSE_ENDING for name in names[:1] if name.endswith("ForMaskedLM")]
    if not sparse or sparse[0] not in _POOLING:
        known = ", ".join(
            name.replace(SPARSE_ENDING, "ForMaskedLM") for name in sorted(_POOLING) if name.endswith(SPARSE_ENDING)
        )
        given = ", ".join(names) or "none"
        raise ValueError(f"{where}: SpladePooling needs an architecture among {known}, and config.json names {given}")
    return {**raw, "architectures": sparse}


def with_causal_names(architectures: Sequence[str]) -> list[str]:
    """The names, and after them those of the generating models that have the same decoder."""
    found = list(architectures)
    for name in architectures:
        if ending := _ending(name):
            base = name.removesuffix(ending)
            bases = dict.fromkeys((base, base.removesuffix("Text"), base.removesuffix("Bidirectional")))
            found += [each + head for each in bases for head in ("ForCausalLM", "LMHeadModel")]
    return found


def _ending(name: str) -> str:
    is_head = name.endswith("LMHeadModel")
    return "" if is_head else next((ending for ending in _ENDINGS if name.endswith(ending)), "")


class _ModelRegistry:
    """The architectures that have a model here, and callers' own."""

    def __init__(self) -> None:
        self._models: dict[str, type[nn.Module] | str] = {**_NATIVE}

    def get_supported_archs(self) -> AbstractSet[str]:
        """Their names in config.json."""
        return self._models.keys()

    def register_model(self, model_arch: str, model_cls: type[nn.Module] | str) -> None:
        """Run `model_arch` by `model_cls`, from now on and in this process; with several processes, register it in a
        plug-in of the entry points `vllm.general_plugins`, which all of them load. docs/adding_a_model.md says what a
        model's class has to have. One that is registered already is replaced, with a warning.

        Args:
            model_arch: the name among config.json's `architectures`.
            model_cls: the class, or "module:Class", which is imported when the model is built.

        Raises:
            TypeError: `model_arch` is no str, or `model_cls` neither a str nor a subclass of nn.Module.
            ValueError: `model_cls` is a str without the form "module:Class".
        """
        if not isinstance(model_arch, str):
            raise TypeError(f"register_model: model_arch must be a str, got {type(model_arch).__name__}")
        if isinstance(model_cls, str):
            module_name, _, class_name = model_cls.partition(":")
            if not module_name or not class_name or ":" in class_name:
                raise ValueError(f"register_model: model_cls must be 'module:Class', got {model_cls!r}")
        else:
            _check_model_class(model_cls, "register_model: model_cls must be 'module:Class' or")
        if self._models.get(model_arch, model_cls) != model_cls:
            logger.warning("architecture %s was registered already: now %s runs it", model_arch, model_cls)
        self._models[model_arch] = model_cls

    def find(self, architectures: Sequence[str]) -> type[nn.Module] | str | None:
        """The entry of the first known architecture; None if there is none."""
        return next((self._models[name] for name in architectures if name in self._models), None)


adopt: Callable[[type[nn.Module]], type[nn.Module]] | None = None
"""Makes of a caller's class that is built in another way one that the loader can build; others stay as they are."""


ModelRegistry = _ModelRegistry()


def supported_architectures() -> list[str]:
    """The registry's names, sorted."""
    return sorted(ModelRegistry.get_supported_archs())


TRANSFORMERS = "vllm.models.transformers.backend:TransformersForCausalLM"
"""The entry of what runs as transformers' own module."""


def model_entry(
    architectures: Sequence[str], model_impl: str = "auto", raw: Mapping[str, Any] | None = None
) -> type[nn.Module] | str:
    """The class of a model, or its "module:Class", which is not imported: that of the first known architecture, and
    TRANSFORMERS for the others or, with `model_impl` "transformers", for all. `raw`: the content of config.json, of
    which some options decide, too.

    Raises:
        ValueError: there is none and `model_impl` is "vllm"; the message says what can be done.
    """
    if (raw or {}).get("position_embedding_type") == "rotary":
        architectures = [_ROTARY.get(name, name) for name in architectures]
    found = None if model_impl == "transformers" else ModelRegistry.find(architectures)
    if found is None and model_impl != "transformers":
        found = next((_POOLING[name] for name in architectures if name in _POOLING), None)
        found = found or ModelRegistry.find(with_causal_names(architectures))
    if found is not None:
        return found
    if model_impl != "vllm":
        return TRANSFORMERS
    given = ", ".join(architectures) or "none"
    raise ValueError(
        f"config.json: architectures names {given}, which has no model of ours: use model_impl='transformers', or "
        f"register a model by ModelRegistry.register_model. There are {', '.join(supported_architectures())}"
    )


def import_model_class(entry: type[nn.Module] | str) -> type[nn.Module]:
    """The class that the loader builds for an entry. ValueError: it cannot be imported, or is no nn.Module."""
    found = _import(entry)
    return found if adopt is None else adopt(found)


def _import(entry: type[nn.Module] | str) -> type[nn.Module]:
    if not isinstance(entry, str):
        return entry
    module_name, _, class_name = entry.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the model class {entry!r} cannot be imported: {error}") from error
    return _check_model_class(found, f"the model class {entry!r} must be")


def resolve_model_class(architectures: Sequence[str]) -> type[nn.Module]:
    """The class of `model_entry`, of ours. ValueError: there is none, or it cannot be imported."""
    return _import(model_entry(architectures, "vllm"))


def _check_model_class(found: Any, problem: str) -> type[nn.Module]:
    from torch import nn

    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    raise TypeError(f"{problem} a subclass of torch.nn.Module, got {found!r}")
