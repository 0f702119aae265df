"""The model and how it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm import envs
from vllm.config.checkpoint.late_interaction import LateInteraction
from vllm.config.checkpoint.picture_part import check_processor, why_no_pictures
from vllm.config.checkpoint.sentence_transformers import SentencePooling
from vllm.config.checks import at_least, one_of
from vllm.config.load import LOAD_FORMATS, OTHER_FORMATS
from vllm.config.pooler import PoolerConfig
from vllm.exceptions import shown
from vllm.inputs.images import KINDS, MAX_IMAGES
from vllm.inputs.media.access import MediaAccess
from vllm.inputs.media.films import FilmFrames
from vllm.pooling_params import check_dimensions
from vllm.sampling_params import LOGPROBS_MODES, MAX_LOGPROB_TOKEN_IDS
from vllm.sampling_params import LogprobsMode as LogprobsMode
from vllm.utils.checks import MAX_INTEGER, check_number

if TYPE_CHECKING:
    from vllm.config.checkpoint.config import HFConfig

DTYPES = ("float32", "bfloat16", "float16")
ModelDType = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
RunnerOption = Literal["auto", "generate", "pooling", "draft"]
AttnTypeStr = Literal["decoder", "encoder", "encoder_only", "encoder_decoder", "attention_free", "hybrid"]
"""Upstream's values, for callers' annotations; what this engine takes of them, it checks where they are given."""
MODEL_IMPLS = ("auto", "vllm", "transformers")
ATTENTION_BACKENDS = ("auto", "paged", "varlen", "flashinfer")


def check_limits(args: Any) -> None:
    """Check the values of a ModelConfig, or of arguments of that name, which no model decides.

    Raises:
        ValueError: names the field, its value and the limit.
    """
    one_of("logprobs_mode", args.logprobs_mode, LOGPROBS_MODES)
    one_of("tokenizer_mode", args.tokenizer_mode, ("auto", "slow"))
    if args.max_seq_len_to_capture is not None:
        at_least("max_seq_len_to_capture", args.max_seq_len_to_capture, 1)
    if args.packed_cache_gib is not None:
        check_number("packed_cache_gib", args.packed_cache_gib, 0, math.inf)
    at_least("max_logprobs", args.max_logprobs, -1)
    at_least("max_logprob_token_ids", args.max_logprob_token_ids, -1)


@dataclass(frozen=True)
class ModelConfig:
    """The model, its tokenizer and the limits that follow from them.

    Attributes:
        model: what the user named.
        path: the local folder that holds config.json and the weights (a GGUF file's converted copy).
        tokenizer: folder of the tokenizer.
        dtype: "float32", "bfloat16" or "float16": weights and activations; logits are read in float32.
        attention_backend: "paged" (our kernels), "varlen" (FlashAttention by way of torch), "flashinfer" or "auto".
        quantization: the checkpoint's format, or what is done to its weights on loading (docs/quantization.md). None
            and "gguf": weights are as `dtype` says.
        served_model_name: names of the model for requests; none = `model`.
        default_sampling_params: what requests that name no value sample with, beside SamplingParams' defaults.
        generation_config, override_generation_config: where these come from, for callers that read it.
        model_impl: whose code runs the model: "vllm" (ours, or a registered one), "transformers" (transformers' module
            with our attention, linears and head) or "auto": ours where there is one, else transformers'.
        rounding: "vllm"; "transformers": activations and logits are rounded to `dtype` wherever its modules do;
            "autocast": wherever these do under torch.autocast with bfloat16. "auto" becomes VLLM_ROUNDING's value.
        load_format: "auto" loads the folder's weights, "dummy" makes random ones up; others are callers' loaders.
        model_loader_extra_config: options of such a loader.
        packed_cache_gib: the most that packed weights may take on disk, of all models together; None: half of what is
            free.
        max_model_len: longest prompt plus output, in tokens.
        max_logprobs: cap on `logprobs`; -1 = the vocabulary.
        max_logprob_token_ids: cap on the length of `logprob_token_ids`; -1 = the vocabulary.
        logprobs_mode: the mode of requests that name none.
        logits_processors: classes of custom logits processors, loaded.
        max_seq_len_to_capture: CUDA graphs are for decode steps whose longest context has at most so many tokens;
            None: for all.
        enable_prompt_embeds: prompts may have embeddings in place of tokens.
        language_model_only: a model that reads pictures runs as its text decoder alone.
        limit_mm_per_prompt: the most pictures and videos of a prompt, as {"image": N, "video": M}; with no picture, as
            `language_model_only`.
        media_io_kwargs: which frames of films are read; see FilmFrames.
        mm_processor_kwargs: options of the picture processor, beside the checkpoint's own.
        allowed_media_domains, allowed_local_media_path: what requests may have fetched or read; see MediaAccess.
        enable_mm_embeds: pictures may come as the rows that the model's tower makes of them.
        interleave_mm_strings: templates of texts get pictures where the message has them, and not before its text.
        encoder_cache_bytes: of rows of encoded pictures that are kept.
        runner: "generate" or "pooling". The fields after it are of pooling models:
        convert: what is pooled: "embed", "classify", "token_classify" or "reward".
        attn_type: "decoder", or "encoder_only", where tokens see those after them, too.
        pooling: from hidden states to an embedding, or the input of a classifier.
        pooling_tasks: what it can do, the default first.
        late_interaction: how queries and documents become tokens that are compared one by one; None: as other texts.
    """

    model: str
    # The folder's config.json says what a caller leaves out.
    path: str = ""
    tokenizer: str = ""
    hf_config: HFConfig = None  # type: ignore[assignment]
    dtype: str = "auto"
    max_model_len: int = None  # type: ignore[assignment]
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    seed: int = 0
    max_logprobs: int = 20
    max_logprob_token_ids: int = MAX_LOGPROB_TOKEN_IDS
    logprobs_mode: str = "raw_logprobs"
    enforce_eager: bool = False
    quantization: str | None = None
    load_format: str = "auto"
    model_loader_extra_config: dict[str, Any] | None = None
    packed_cache_gib: float | None = None
    model_impl: str = "auto"
    rounding: str = "auto"
    logits_processors: tuple[type, ...] = ()
    max_seq_len_to_capture: int | None = None
    attention_backend: str = "auto"
    served_model_name: tuple[str, ...] = ()
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
    enable_prompt_embeds: bool = False
    language_model_only: bool = False
    limit_mm_per_prompt: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    allowed_media_domains: list[str] | None = None
    allowed_local_media_path: str = ""
    enable_mm_embeds: bool = False
    interleave_mm_strings: bool = False
    encoder_cache_bytes: int = 256 << 20
    runner: str = "generate"
    convert: str = "none"
    attn_type: str = "decoder"
    pooler_config: PoolerConfig = field(default_factory=PoolerConfig)
    pooling: SentencePooling = field(default_factory=SentencePooling)
    pooling_tasks: tuple[str, ...] = ()
    late_interaction: LateInteraction | None = None

    def __post_init__(self) -> None:
        self._complete()
        one_of("dtype", self.dtype, DTYPES)
        one_of("load_format", self.load_format, (*LOAD_FORMATS, *sorted(OTHER_FORMATS)))
        check_limits(self)
        if self.rounding == "auto":
            object.__setattr__(self, "rounding", envs.rounding())
        one_of("rounding", self.rounding, ("vllm", "transformers", "autocast"))
        one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        at_least("max_model_len", self.max_model_len, 1)
        self._fill("limit_mm_per_prompt", image_limit(self.limit_mm_per_prompt))
        if not isinstance(self.mm_processor_kwargs, dict | None):
            raise ValueError(f"mm_processor_kwargs must be a dict of options, got {self.mm_processor_kwargs!r}")
        MediaAccess.of(self.allowed_media_domains, self.allowed_local_media_path)
        FilmFrames.of(self.media_io_kwargs)
        if self.enable_mm_embeds and self.why_no_images:
            raise ValueError(f"enable_mm_embeds=True is for a model that reads pictures: {self.why_no_images}")
        if not self.why_no_images:
            check_processor(self.hf_config.raw, Path(self.path))
        check_dimensions(self.pooler_config.dimensions, self)
        if self.runner == "pooling" and self.enable_prompt_embeds:
            raise ValueError(
                "enable_prompt_embeds=True is for models that generate, and this one is a pooling model: leave it out"
            )
        if self.runner == "pooling" and (self.pooler_config.max_embed_len or 0) > self.max_embed_len:
            raise ValueError(
                f"pooler_config: max_embed_len={self.pooler_config.max_embed_len} is more than "
                f"max_model_len={self.max_model_len}, and needs enable_chunked_processing"
            )

    @property
    def vocab_size(self) -> int:
        """Number of logits a row has."""
        return self.hf_config.vocab_size

    @property
    def architecture(self) -> str:
        """The first that config.json names."""
        return self.hf_config.architectures[0]

    @property
    def runner_type(self) -> str:
        """The model is served as this: "generate" or "pooling"."""
        return self.runner

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the model can be asked for: "generate", or the tasks of a pooling model, the default first."""
        return self.pooling_tasks if self.runner == "pooling" else ("generate",)

    @property
    def embedding_size(self) -> int:
        """Length of an embedding."""
        return self.pooling.size(self.hf_config.hidden_size)

    @property
    def input_embedding_size(self) -> int:
        """Length of the embedding of a prompt's token."""
        # OPT's may differ from the hidden states.
        return int(self.hf_config.raw.get("word_embed_proj_dim") or self.hf_config.hidden_size)

    @property
    def max_embed_len(self) -> int:
        """Longest text that is embedded, in tokens; one beyond max_model_len in parts."""
        pooler = self.pooler_config
        if pooler.enable_chunked_processing:
            return pooler.max_embed_len or MAX_INTEGER
        return min(pooler.max_embed_len or self.max_model_len, self.max_model_len)

    @property
    def is_matryoshka(self) -> bool:
        """Whether config.json says that an embedding's first numbers are one, too."""
        return bool(self.matryoshka_dimensions or self.hf_config.raw.get("is_matryoshka"))

    @property
    def matryoshka_dimensions(self) -> list[int] | None:
        """Lengths to which embeddings can be cut, by config.json; None: it has none."""
        return self.hf_config.raw.get("matryoshka_dimensions") or None

    @property
    def class_padding_id(self) -> int | None:
        """The token that a decoder's classifier of sequences looks past, as transformers' do: classes are read from the
        last other one. None: there is none."""
        is_classifier = self.convert == "classify" and self.architecture.endswith("ForSequenceClassification")
        if not is_classifier or self.hf_config.is_encoder or self.pooling.modes != ("lasttoken",):
            return None
        return None if self.hf_config.raw.get("classifier_from_token") else self.hf_config.raw.get("pad_token_id")

    @property
    def reads_images(self) -> bool:
        """Whether prompts may have pictures."""
        return not self.why_no_images

    @property
    def why_no_images(self) -> str:
        """Why prompts may have no pictures; empty: they may."""
        if self.language_model_only:
            return "the engine was started with language_model_only=True"
        if self.max_images == 0:
            return 'the engine was started with limit_mm_per_prompt={"image": 0}'
        return why_no_pictures(self.hf_config.raw, Path(self.path))

    @property
    def media_access(self) -> MediaAccess:
        """The hosts and files that requests may have fetched or read."""
        return MediaAccess.of(self.allowed_media_domains, self.allowed_local_media_path)

    @property
    def film_frames(self) -> FilmFrames:
        """The frames of films that requests have read."""
        return FilmFrames.of(self.media_io_kwargs)

    @property
    def max_images(self) -> int:
        """The most pictures of a prompt."""
        return self.max_media["image"]

    @property
    def max_media(self) -> dict[str, int]:
        """The most items of a prompt, by their kind."""
        return {kind: int((self.limit_mm_per_prompt or {}).get(kind, MAX_IMAGES)) for kind in KINDS}

    def _complete(self) -> None:
        """Fill in what was left out.

        Raises:
            FileNotFoundError: the model is not there.
            ValueError: its config.json cannot be used.
        """
        from vllm.config.checkpoint.config import load_hf_config
        from vllm.config.checkpoint.hub import download

        if self.hf_config is None:
            folder = Path(self.path or self.model).expanduser()
            if not folder.is_dir():
                folder = download(self.model, self.revision, weights=False)
            self._fill("path", str(folder))
            self._fill("hf_config", load_hf_config(folder))
        if not self.tokenizer:
            self._fill("tokenizer", self.path or self.model)
        if self.dtype == "auto":
            self._fill("dtype", self.hf_config.dtype or "float32")
        if self.max_model_len is None:
            self._fill("max_model_len", self.hf_config.max_context_len)

    def _fill(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def one_capture_length(older: int | None, newer: int | None) -> int | None:
    """max_seq_len_to_capture of its two arguments.

    Raises:
        ValueError: they are given, and differ.
    """
    if older is not None and newer is not None and older != newer:
        raise ValueError(
            f"max_context_len_to_capture={older} and max_seq_len_to_capture={newer} are one setting: give one"
        )
    return older if newer is None else newer


_OTHER_MEDIA = ("audio", "vision_chunk")


def image_limit(given: Any) -> dict[str, int]:
    """limit_mm_per_prompt as {"image": N, "video": M}. Upstream's longer form, {"image": {"count": N}}, is one, too.

    Raises:
        ValueError: another kind of media is to be read, or a limit is no number.
    """
    if given is None:
        return {}
    name = "limit_mm_per_prompt"
    if not isinstance(given, dict):
        raise ValueError(f'{name} must be a dict such as {{"image": 4}}, got {shown(given)}')
    limits: dict[str, int] = {}
    for kind, value in given.items():
        if isinstance(value, dict):
            value = value.get("count", MAX_IMAGES)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}: {kind} must be a number from 0 on, got {shown(value)}")
        if kind in KINDS:
            limits[kind] = value
        elif kind not in _OTHER_MEDIA:
            raise ValueError(f"{name} has no kind {shown(kind)}; there are {', '.join(KINDS)}")
        # A limit on what is refused in any case asks for nothing.
    return limits
