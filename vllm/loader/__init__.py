"""Building a resolved model with its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

# Most models are made of these: imported with the engine, not when one is loaded.
import vllm.models.dense.llama  # noqa: F401
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.checkpoint.mapped_tensors import block_bytes
from vllm.config.load import reads_folder
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.stages import get_stage
from vllm.layers.adapted.products import adapter_places
from vllm.layers.attention import Attention
from vllm.layers.experts import Experts
from vllm.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.layers.linear_method import LinearMethod, linear_method
from vllm.layers.vocab_parallel_embedding import VocabShard
from vllm.layers.weight_update import WeightUpdater
from vllm.loader.early_packing import EarlyPacking
from vllm.loader.packed_weights import PackedWeights, Plan, open_packed_weights
from vllm.loader.resolve import (
    NO_EMBEDDED_MODEL,
    ResolvedModel,
    embedded_model_path,
    resolve_model,
)
from vllm.loader.stage_layers import layers_of_stage
from vllm.loader.weights import fill_with_noise, load_weights
from vllm.models.pooled_decoder import use_pooling_head
from vllm.models.registry import PAIR, TRANSFORMERS, import_model_class, model_entry
from vllm.models.transformers.eager import PRODUCTS
from vllm.models.transformers.encoder import TransformersEncoder
from vllm.models.vision.pair import PairEmbedder
from vllm.ops.packing import packing_in_background
from vllm.quantization.base_config import QuantizationConfig
from vllm.quantization.settings import load_quantization
from vllm.quantization.stored import StoredConfig
from vllm.utils.host_memory import return_freed_memory, scratch
from vllm.utils.loading_threads import helped, native_work_begins, one_thread, side_by_side

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.config.checkpoint.config import HFConfig

__all__ = ["NO_EMBEDDED_MODEL", "ResolvedModel", "embedded_model_path", "get_model", "resolve_model"]


LOADERS: dict[str, Callable[[nn.Module, VllmConfig], None]] = {}
"""By load_format, callers' ways to fill a model that was built."""


def get_model(
    model_config: ModelConfig,
    device: torch.device | str,
    use_tqdm: bool = False,
    takes_adapters: bool = False,
    part: Callable[[HFConfig, int], nn.Module] | None = None,
    engine: VllmConfig | None = None,
    plan: Plan | None = None,
) -> nn.Module:
    """Build the model of `model_config` on `device`, with its weights loaded (random with load_format="dummy") and
    packed. Its methods are those of LlamaForCausalLM; one that `takes_adapters` has `adapter_places`. `part`: makes, of
    a configuration and max_model_len, what is built in the model's place; it takes those of the checkpoint's tensors
    for which its `checkpoint_tensors` has names. `engine`: what callers' models may read; None = the model's alone.
    `plan`: what a group's ranks do with packed weights on disk.

    Raises:
        ValueError: an architecture that is not supported, or weights that are missing, unexpected or of another shape.
    """
    config = model_config.hf_config
    entry = model_entry(config.architectures, model_config.model_impl, config.raw)
    if config.is_encoder and entry == TRANSFORMERS:
        return TransformersEncoder(model_config, torch.device(device), takes_adapters)
    if entry == PAIR:
        return PairEmbedder(model_config, torch.device(device), takes_adapters)
    quantization = load_quantization(model_config.quantization, Path(model_config.path), config.raw)
    _check_invariance(model_config, torch.device(device))
    is_ours = quantization is None or isinstance(quantization, StoredConfig)
    if (stage := get_stage()).size > 1:
        stage.layers = layers_of_stage(model_config, stage)
    keeps = part is None and is_ours and torch.device(device).type == "cpu"
    with (
        _naming(model_config),
        open_packed_weights(model_config, takes_adapters, plan) if keeps else contextlib.nullcontext() as kept,
    ):
        model = _filled(model_config, quantization, torch.device(device), use_tqdm, takes_adapters, part, engine, kept)
        if entry == TRANSFORMERS:
            # Packed weights are there from here on.
            model.check_loaded()
    # Loading and packing freed, with a small model, as much memory as the weights take.
    return_freed_memory()
    return model.eval()


def _filled(
    model_config: ModelConfig,
    quantization: QuantizationConfig | None,
    device: torch.device,
    use_tqdm: bool,
    takes_adapters: bool,
    part: Callable[[HFConfig, int], nn.Module] | None,
    engine: VllmConfig | None,
    kept: PackedWeights | None,
) -> Any:
    """The model, with the packed weights that are `kept`, or else those that it loads and packs."""
    is_there = kept is not None and kept.content is not None
    packs_meanwhile = isinstance(quantization, StoredConfig) and device.type == "cpu" and not is_there
    num_bytes = block_bytes(Path(model_config.path)) // get_tp_group().world_size if packs_meanwhile else 0
    with packing_in_background(num_bytes) if packs_meanwhile else contextlib.nullcontext():
        # Most of the work is the other threads'.
        is_light = num_bytes > 0
        if is_light or is_there:
            # Before they work, the tokenizer has the caches for itself.
            native_work_begins()
        model = _build(model_config, quantization, device, part, engine)
        # "fp8" is also the name of a checkpoint's format.
        method = linear_method(model_config.quantization if quantization is None else None)
        if model_config.rounding != "vllm":
            method = PRODUCTS
        model.weight_updater = WeightUpdater(model, method)
        if takes_adapters:
            model.adapter_places = adapter_places(model)
        mixtures = [module for module in model.modules() if isinstance(module, Experts)]
        for module in mixtures:
            module.method = method
        if is_there and kept is not None and kept.restore(model):
            return model
        if kept is not None:
            kept.built(model)
        early: EarlyPacking | None = None
        # A model's own code for loading writes into its parameters, which must be in memory.
        is_by_slots = reads_folder(model_config.load_format) and not hasattr(model, "load_checkpoint")
        if quantization is None and device.type == "cpu" and is_by_slots:
            pack = partial(_pack_one, method, None if kept is None else kept.take)
            early = EarlyPacking(model, pack, method.takes_parts)
        with torch.inference_mode(), one_thread() if is_light else contextlib.nullcontext():
            helpers = helped() if (mixtures or early) and not is_light else contextlib.nullcontext()
            with scratch.kept(), helpers:
                if model_config.load_format == "dummy":
                    fill_with_noise(model, model_config.seed)
                elif fill := LOADERS.get(model_config.load_format):
                    _check_plain(quantization, model_config.load_format)
                    fill(model, VllmConfig(model_config) if engine is None else engine)
                else:
                    _load(model, Path(model_config.path), use_tqdm, quantization, early)
            packed = set() if early is None else early.packed
            _pack(model, method, quantization, device, is_light, None if kept is None else kept.take, packed)
    if kept is not None:
        kept.keep(model)
    return model


def _check_plain(quantization: QuantizationConfig | None, load_format: str) -> None:
    """ValueError: the checkpoint has quantised weights."""
    if isinstance(quantization, StoredConfig):
        raise ValueError(
            f"load_format={load_format!r} fills plain weights only, but the checkpoint is of "
            f"{quantization.get_name()!r}: use load_format='auto'"
        )


def _load(
    model: Any, folder: Path, use_tqdm: bool, quantization: QuantizationConfig | None, early: EarlyPacking | None
) -> None:
    """By the model's own `load_checkpoint`, where it has one."""
    own = getattr(model, "load_checkpoint", None)
    if own is not None:
        own(folder, use_tqdm)
    else:
        load_weights(model, folder, use_tqdm, quantization, filled=None if early is None else early.filled)


def _pack_one(method: LinearMethod, take: Callable[[nn.Module], None] | None, module: Any) -> None:
    module.process_weights_after_loading(method)
    if take is not None:
        take(module)


def _check_invariance(model_config: ModelConfig, device: torch.device) -> None:
    """ValueError: results are to be the same in every batch, and cannot be."""
    if envs.batch_invariant() and device.type == "cuda" and model_config.quantization not in (None, "gguf"):
        raise ValueError(
            "VLLM_BATCH_INVARIANT=1 cannot be kept: on CUDA the sums of quantised weights follow the batch, got "
            f"quantization={model_config.quantization!r}"
        )


def _build(
    model_config: ModelConfig,
    quantization: QuantizationConfig | None,
    device: torch.device,
    part: Callable[[HFConfig, int], nn.Module] | None,
    engine: VllmConfig | None,
) -> Any:
    """The model, or the part in its place, its weights not loaded."""
    config = model_config.hf_config
    entry = model_entry(config.architectures, model_config.model_impl, config.raw)
    make: Any = part or import_model_class(entry)
    with _building(getattr(torch, model_config.dtype), device):
        if entry == TRANSFORMERS and part is None:
            model = make(model_config)
        elif getattr(make, "takes_engine_config", False):
            model = make(VllmConfig(model_config) if engine is None else engine)
        else:
            model = make(config, model_config.max_model_len)
        if model_config.runner_type == "pooling" and not config.is_encoder:
            use_pooling_head(model, model_config)
        if quantization is not None:
            _use_quantization(model, quantization, model_config)
    return model


@contextlib.contextmanager
def _naming(model_config: ModelConfig) -> Iterator[None]:
    """Errors about what a GGUF file was converted to name the file."""
    try:
        yield
    except ValueError as error:
        file = Path(model_config.model)
        if file.suffix != ".gguf":
            raise
        raise ValueError(f"{file.name}: {error}") from None


def _pack(
    model: nn.Module,
    method: LinearMethod,
    quantization: QuantizationConfig | None,
    device: torch.device,
    is_light: bool,
    take: Callable[[nn.Module], None] | None,
    packed: set[nn.Module],
) -> None:
    """Pack the weights of all layers that are not `packed`, on the CPU side by side; a user's method has its layers one
    after another, as have those whose work is left to other threads (`is_light`). `take` is given what is packed."""
    modules: list[Any] = [
        module
        for module in model.modules()
        if hasattr(module, "process_weights_after_loading") and module not in packed
    ]
    calls = [partial(module.process_weights_after_loading, method) for module in modules]
    is_own = quantization is not None and not isinstance(quantization, StoredConfig)
    native_work_begins()
    if is_own or is_light or device.type != "cpu":
        for call in calls:
            call()
        return
    # The head, which is the last one, takes longest.
    for module, _ in zip(reversed(modules), side_by_side(reversed(calls)), strict=True):
        if take is not None:
            take(module)


def _use_quantization(model: nn.Module, quantization: QuantizationConfig, model_config: ModelConfig) -> None:
    """Give each layer its method. Those of a checkpoint's format take memory for a weight only if it is plain.

    Raises:
        ValueError: `quantization` does not have the model's dtype, or a method for what is no linear layer; or there
            are no weights to load.
    """
    dtypes = quantization.get_supported_act_dtypes()
    if getattr(torch, model_config.dtype) not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"quantization={quantization.get_name()!r} has dtype {names}, got {model_config.dtype!r}")
    if isinstance(quantization, StoredConfig) and model_config.load_format == "dummy":
        raise ValueError(
            f"load_format='dummy' makes up plain weights only, but the checkpoint is of {quantization.get_name()!r}"
        )
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            module.prefix, module.quant_config = name, quantization
            if isinstance(quantization, StoredConfig):
                module.defer_weight()
                continue
        elif isinstance(quantization, StoredConfig) or not isinstance(module, VocabShard | Attention):
            continue
        method = quantization.get_quant_method(module, name)
        if method is None or type(method) is UnquantizedLinearMethod:
            continue
        if not isinstance(module, LinearBase):
            raise ValueError(
                f"quantization={quantization.get_name()!r} has the method {type(method).__name__} for {name}, a "
                f"{type(module).__name__}: only linear layers (LinearBase) can have one"
            )
        module.use_quant_method(method)


@contextlib.contextmanager
def _building(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """New parameters get this dtype and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
