"""A model that was written for upstream, as the engine runs one: its layers take the step from here, its head's logits
become the rank's, its own `load_weights` fills it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.config import VllmConfig
from vllm.config.checkpoint.auto_config import describe
from vllm.config.checkpoint.config import HFConfig
from vllm.config.checkpoint.shards import shard_files
from vllm.config.checkpoint.weight_files import iterate_tensors, progress_bar, tensor_files
from vllm.distributed.communicator import split_vocab
from vllm.distributed.parallel_state import get_tp_group, tensor_parallel
from vllm.layers.attention import attention_layers
from vllm.layers.experts import Experts
from vllm.layers.state import state_layers
from vllm.layers.vocab_parallel_embedding import ParallelLMHead as OurHead
from vllm.layers.vocab_parallel_embedding import VocabParallelEmbedding as OurEmbedding
from vllm.layers.weight_update import UpdatableModel
from vllm.quantization.stored import Value
from vllm.upstream.config.current import set_current_vllm_config
from vllm.upstream.model_interfaces import is_pooling_model, supports_lora
from vllm.upstream.outside.attention import Attention
from vllm.upstream.outside.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.upstream.outside.linear import LinearBase
from vllm.upstream.outside.pooler import OwnPooler
from vllm.upstream.outside.states import MambaBase, StatefulCalls
from vllm.upstream.outside.step import ForwardContext, Step, forward_context
from vllm.upstream.outside.views import transformers_config, view_of

_NUM_NAMED = 5
# Arguments of models of former versions, and of those now.
_FORMER_ARGUMENTS = {"cache_config", "quant_config", "lora_config"}


def is_outside(model_class: type[nn.Module]) -> bool:
    """Whether a class is built as upstream builds models."""
    names = inspect.signature(model_class.__init__).parameters.keys()
    return "vllm_config" in names or ("config" in names and bool(_FORMER_ARGUMENTS & names))


@functools.cache
def adopted(model_class: type[nn.Module]) -> type[nn.Module]:
    """The class that runs models of `model_class`; itself, if the engine can."""
    if issubclass(model_class, UpdatableModel) or not is_outside(model_class):
        return model_class
    name = model_class.__name__
    return type(name, (OutsideModel,), {"outside_class": model_class, "__module__": __name__, "__qualname__": name})


class Logits:
    """In the place of a head: which logits of a row are the rank's. Nothing multiplies by it."""

    plain_weight: ClassVar[None] = None
    is_final: ClassVar[bool] = False

    def __init__(self, vocab_size: int) -> None:
        self.group = get_tp_group()
        self.vocab_size = vocab_size
        self.vocab_range = split_vocab(vocab_size, self.group.world_size)[self.group.rank]


class OutsideModel(UpdatableModel):
    """A model of `outside_class`, its children registered under its own names. Methods: see CausalLM."""

    outside_class: ClassVar[type[nn.Module]]
    takes_engine_config: ClassVar[bool] = True

    @classmethod
    def load_config(
        cls, raw: dict[str, Any], folder: Path, generation: dict[str, Any], trust_remote_code: bool
    ) -> HFConfig:
        """The part of the model's configuration that the engine reads.

        Raises:
            ValueError: config.json lacks a size, or has what such models cannot have.
        """
        name = cls.outside_class.__name__
        _refuse_checkpoint(raw, name)
        auto = transformers_config(raw, folder, trust_remote_code)
        text = auto.get_text_config()
        heads = _size(text, name, "num_attention_heads")
        hidden = _size(text, name, "hidden_size")
        geometry = {
            "hidden_size": hidden,
            "vocab_size": _size(text, name, "vocab_size"),
            "num_hidden_layers": _size(text, name, "num_hidden_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or hidden // heads,
        }
        config = describe(text, geometry, raw, generation)
        return _for_pooling(config, cls.outside_class) if is_pooling_model(cls.outside_class) else config

    def __init__(self, config: VllmConfig) -> None:
        """ValueError: the model asks for what is not served; it names that."""
        super().__init__()
        model_config = config.model_config
        self._vocab_size, self._step = model_config.vocab_size, Step()
        raw, folder = model_config.hf_config.raw, Path(model_config.path)
        view = view_of(config, transformers_config(raw, folder, model_config.trust_remote_code))
        _refuse_engine(config, self.outside_class)
        with set_current_vllm_config(view):  # type: ignore[arg-type]
            inner: Any = _construct(self.outside_class, view)
        inner.requires_grad_(False)
        # In a tuple: its modules are registered as this one's children.
        self._inner = (inner,)
        self._heads_of_embeddings(inner)
        self._name_parts(inner)
        self._use_step()
        for name, child in inner.named_children():
            self.add_module(name, child)
        for name, parameter in inner.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        # Not as a module: where there is one, it is one already.
        self.__dict__["lm_head"] = self._logits = Logits(self._vocab_size)
        self._arguments = _accepted(inner.forward)
        self._takes_metadata = hasattr(inner, "compute_logits") and len(_positional(inner.compute_logits)) > 1
        self._is_whole = model_config.hf_config.is_encoder
        self.own_pooler: OwnPooler | None = None
        if self._is_whole and getattr(inner, "pooler", None) is not None:
            self.own_pooler = OwnPooler(inner.pooler, model_config)

    @property
    def inner(self) -> Any:
        """The model of `outside_class`."""
        return self._inner[0]

    # -- what the model is made of ------------------------------------------------------------------------------------

    def _heads_of_embeddings(self, inner: Any) -> None:
        """Give embeddings that are the head, too, the head that multiplies with their weight."""
        for module in list(inner.modules()):
            if isinstance(module, ParallelLMHead):
                module.take_shared_weight(inner)
        if any(isinstance(module, ParallelLMHead) for module in inner.modules()):
            return
        embeddings = [each for each in inner.modules() if isinstance(each, VocabParallelEmbedding)]
        for embedding in embeddings:
            if embedding.vocab_size >= self._vocab_size and embedding.head[0] is None:
                head = OurHead(embedding.vocab_size, embedding.embedding_dim, embedding)
                embedding.head = (head,)
                self.add_module("head_of_embedding", head)
                return

    def _name_parts(self, inner: Any) -> None:
        mapping: dict[str, list[str]] = getattr(inner, "packed_modules_mapping", None) or {}
        for name, module in inner.named_modules():
            if isinstance(module, LinearBase) and len(module.parts) > 1:
                names = mapping.get(name.rpartition(".")[2])
                if names is not None and len(set(names)) == len(names):
                    module.name_parts(names)

    def _use_step(self) -> None:
        layers = attention_layers(self._inner[0])
        places = {layer.layer_name: index for index, layer in enumerate(layers) if isinstance(layer, Attention)}
        for index, layer in enumerate(layers):
            if isinstance(layer, Attention):
                layer.step, layer.index = self._step, index
                target = layer.kv_sharing_target_layer_name
                if target is not None:
                    if target not in places:
                        raise ValueError(f"kv_sharing_target_layer_name={target!r} is no attention layer of the model")
                    layer.kv_sharing_target = places[target]
        self._layers_by_name: dict[str, Any] = {layer.layer_name: layer for layer in layers}  # type: ignore[misc]
        for own in state_layers(self._inner[0]):
            if isinstance(own, MambaBase):
                own.use_states()
                self._layers_by_name[own.prefix] = StatefulCalls(own)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The model's name of a checkpoint's tensor, by its `hf_to_vllm_mapper`, where it has one: for adapters."""
        mapper = getattr(self.inner, "hf_to_vllm_mapper", None)
        return iter([(name, tensor)] if mapper is None else mapper.apply([(name, tensor)]))

    # -- weights ------------------------------------------------------------------------------------------------------

    def load_checkpoint(self, folder: Path, use_tqdm: bool) -> None:
        """Fill the model from a folder's safetensors, by its own `load_weights`.

        Raises:
            ValueError: it refuses a tensor, or lacks one.
        """
        files = shard_files(folder)
        with progress_bar("Loading weights", len(tensor_files(files)), use_tqdm) as bar:
            try:
                self.fill(_counted(iterate_tensors(files), bar))
            except (ValueError, KeyError, AssertionError) as error:
                name = self.outside_class.__name__
                raise ValueError(f"{folder.name}: {name}.load_weights: {type(error).__name__}: {error}") from error

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load a whole checkpoint. ValueError: it lacks a parameter of the model."""
        (inner,) = self._inner
        loaded = inner.load_weights(tensors)
        if loaded is not None:
            lacking = sorted({name for name, _ in inner.named_parameters()} - set(loaded))
            if lacking:
                more = f" and {len(lacking) - _NUM_NAMED} more" if len(lacking) > _NUM_NAMED else ""
                raise ValueError(f"the checkpoint lacks weights: {', '.join(lacking[:_NUM_NAMED])}{more}")
        self.finish_loading()

    def finish_loading(self) -> None:
        """Take up what layers derive from their parameters."""
        for layer in attention_layers(self):
            if isinstance(layer, Attention):
                layer.finish_loading()

    def load_weights(self, weights: Iterable[tuple[str, Value]]) -> set[str]:
        """New weights by their checkpoint's names, some or all, in one call; returns the names that were taken.

        Raises:
            ValueError: the model does not take one, or its weights are quantised.
        """
        given: list[str] = []
        with torch.inference_mode(), tensor_parallel(self._logits.group), self._unpacked():
            loaded = self._inner[0].load_weights(_noted(weights, given))
            self.finish_loading()
        return set(given) if loaded is None else set(loaded)

    @contextmanager
    def _unpacked(self) -> Iterator[None]:
        """All layers with plain weights, packed again at the end."""
        layers: list[Any] = [each for each in self.modules() if hasattr(each, "begin_update")]
        for layer in layers:
            layer.check_update()
        heads = [each for each in layers if isinstance(each, OurHead)]
        embeddings = {head.tied_to: head for head in heads if head.tied_to is not None}
        try:
            for layer in layers:
                _unpack(layer, embeddings)
            yield
        finally:
            for layer in layers:
                if hasattr(layer, "process_weights_after_loading"):
                    layer.process_weights_after_loading(self.weight_updater.method)
            for layer in self.modules():
                if isinstance(layer, Experts):
                    layer.restore_lacking()
            self.weight_updater.version += 1
            self.weight_updater.packing_version += 1

    # -- a step -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        attn: AttentionMetadata,
        logits_rows: Tensor | None = None,
    ) -> Tensor:
        """See CausalLM.forward."""
        if self._is_whole and isinstance(attn, list):
            return self._one_by_one(input_ids, positions, attn)
        step = self._step
        step.kv_caches, step.attn = kv_caches, attn
        try:
            hidden = self._run(input_ids=input_ids, positions=positions, kv_caches=kv_caches, attn_metadata=attn)
        finally:
            step.kv_caches, step.attn = [], None
        return hidden if logits_rows is None else hidden.index_select(0, logits_rows)

    def _run(self, **given: Any) -> Tensor:
        """[T, H] of the model's forward, by those of its arguments that are given; None for the others."""
        context = ForwardContext(given.get("attn_metadata"), self._layers_by_name)
        with tensor_parallel(self._logits.group), forward_context(context):
            hidden = self._inner[0](**{name: given.get(name) for name in self._arguments})
        return hidden[0] if isinstance(hidden, tuple) else hidden

    def _one_by_one(self, input_ids: Tensor, positions: Tensor, lengths: list[int]) -> Tensor:
        """A model without layers of attention that know of requests computes one at a time."""
        parts = zip(input_ids.split(lengths), positions.split(lengths), strict=True)
        return torch.cat([self._run(input_ids=ids, positions=places) for ids, places in parts])

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, H] -> this rank's logits, float32 [L, V_rank], those of `lm_head.vocab_range`."""
        extra = (None,) if self._takes_metadata else ()
        with tensor_parallel(self._logits.group):
            logits = self._inner[0].compute_logits(hidden, *extra)
        own = self._logits.vocab_range
        if logits.shape[-1] < self._vocab_size:
            raise ValueError(
                f"{self.outside_class.__name__}.compute_logits gave {logits.shape[-1]} logits a row, but config.json "
                f"says vocab_size={self._vocab_size}"
            )
        return logits[:, own.start : own.stop].float()


def _construct(model_class: type[nn.Module], view: Any) -> nn.Module:
    """Build the model, by the arguments of now or by former ones."""
    parameters = inspect.signature(model_class.__init__).parameters
    has_others = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if "vllm_config" in parameters:
        given = {"vllm_config": view, "prefix": ""}
    else:
        hf = view.model_config.hf_config
        given = {
            "config": hf,
            "cache_config": view.cache_config,
            "quant_config": None,
            "lora_config": None,
            "prefix": "",
        }
    build: Any = model_class
    return build(**{name: value for name, value in given.items() if has_others or name in parameters})


def _accepted(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments of a step that a model's forward takes."""
    parameters = inspect.signature(forward).parameters
    known = ("input_ids", "positions", "kv_caches", "attn_metadata", "intermediate_tensors", "inputs_embeds")
    has_others = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    newer = ("input_ids", "positions", "intermediate_tensors", "inputs_embeds")
    return tuple(name for name in known if name in parameters or (has_others and name in newer))


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    required = inspect.Parameter.empty
    return [each for each in inspect.signature(function).parameters.values() if each.default is required]


def _size(config: Any, model: str, name: str) -> int:
    """ValueError: the configuration lacks it."""
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"config.json: {model} needs {name}, a positive number, got {value!r}: add it by "
            f"hf_overrides={{{name!r}: N}}, or give its configuration class an attribute_map"
        )
    return value


_MODES = {"CLS": "cls", "MEAN": "mean", "LAST": "lasttoken"}


def _for_pooling(config: HFConfig, model_class: Any) -> HFConfig:
    """`config` of a model that is pooled: its requests are computed whole."""
    own = vars(model_class)
    is_of_tokens = "default_tok_pooling_type" in own and "default_seq_pooling_type" not in own
    mode = str(getattr(model_class, "default_seq_pooling_type", None) or "LAST")
    if mode not in _MODES:
        known = ", ".join(_MODES)
        raise ValueError(f"{model_class.__name__}: default_pooling_type must be one of {known}, got {mode!r}")
    kind = "token_embed" if is_of_tokens else "embed"
    return replace(config, is_encoder=True, pooling_kind=kind, default_pooling=_MODES[mode])


def _refuse_engine(config: VllmConfig, model_class: type[nn.Module]) -> None:
    """ValueError: the engine is asked for what such a model cannot do."""
    name, kind = model_class.__name__, config.model_config.quantization
    if config.lora_config is not None and not supports_lora(model_class):
        raise ValueError(f"enable_lora: {name} does not take adapters: derive it from SupportsLoRA, or leave it out")
    if kind not in (None, "fp8", "int8", "int4"):
        raise ValueError(
            f"quantization={kind!r}: {name} is a model from outside the tree, whose weights are plain until they are "
            "loaded: choose fp8, int8 or int4, or leave it out"
        )
    for flag, what in (("supports_multimodal", "media"), ("supports_transcription", "speech")):
        if getattr(model_class, flag, False):
            raise ValueError(f"{name} takes {what}: models from outside the tree are served for texts only")


def _refuse_checkpoint(raw: dict[str, Any], model: str) -> None:
    """ValueError: its weights are quantised."""
    if raw.get("quantization_config"):
        raise ValueError(
            f"config.json: {model} is a model from outside the tree, whose checkpoint must have plain weights, but "
            "there is a quantization_config: de-quantise it, and quantise at the start (quantization='fp8')"
        )


def _counted(tensors: Iterable[tuple[str, Tensor]], bar: Any) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        bar.update()


def _noted(weights: Iterable[tuple[str, Value]], names: list[str]) -> Iterator[tuple[str, Value]]:
    for name, tensor in weights:
        names.append(name)
        yield name, tensor


def _unpack(layer: Any, heads: dict[Any, Any]) -> None:
    """Give a layer its plain weight again."""
    if isinstance(layer, OurEmbedding):
        packed = heads[layer].packed if layer in heads else None
        if layer.begin_update() and packed is not None:
            from vllm.ops.packed_linear import unpack_linear

            assert layer.weight is not None
            layer.weight.data.copy_(unpack_linear(packed, layer.weight.dtype)[0])
    elif isinstance(layer, OurHead):
        _unpack_head(layer)
    elif layer.begin_update():
        layer.restore_values()


def _unpack_head(head: Any) -> None:
    from vllm.ops.packed_linear import unpack_linear

    weight, bias = unpack_linear(head.packed, head.empty.dtype)
    if head.begin_update() and head.weight is not None:
        head.weight.data.copy_(weight)
    if head.bias is not None and bias is not None:
        head.bias.data.copy_(bias)
