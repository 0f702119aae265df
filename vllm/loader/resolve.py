"""From a model's name (none, a folder, a .gguf file, a hub name) to a folder and its configuration."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config.checkpoint.config import CONFIG_FORMATS, HFConfig, parse_hf_config, read_config
from vllm.config.checkpoint.hub import download
from vllm.config.checkpoint.late_interaction import read_late_interaction
from vllm.config.checkpoint.local_model import (
    NO_EMBEDDED_MODEL,
    check_hub_name,
    embedded_model_path,
    local_model,
    model_stem,
)
from vllm.config.checkpoint.overrides import Overrides, overridden_entries
from vllm.config.checkpoint.sentence_files import first_module, sentence_folder
from vllm.config.checkpoint.sentence_transformers import has_sparse_pooling, sentence_length
from vllm.config.checkpoint.shards import shard_files
from vllm.config.checkpoint.weight_files import stored_dtype
from vllm.config.quantization import check_gguf_quantization
from vllm.loader.gguf.convert import converted_folder, folder_with_tower
from vllm.loader.gguf.hub import find_on_hub
from vllm.logger import init_logger, warn_once
from vllm.models.registry import (
    TRANSFORMERS,
    encoder_archs,
    import_model_class,
    model_entry,
    pooling_kind,
    with_sparse_head,
)
from vllm.ops.cpu_kernels import cpu_kernel_isa
from vllm.quantization.settings import resolve_quantization
from vllm.utils.device import cuda_has_bfloat16
from vllm.utils.packages import needed_by

__all__ = ["NO_EMBEDDED_MODEL", "ResolvedModel", "embedded_model_path", "resolve_model"]

logger = init_logger(__name__)


@dataclass(frozen=True)
class ResolvedModel:
    """A model that is ready to be loaded."""

    name: str  # without the folders above it
    path: Path  # local folder with config.json, safetensors and tokenizer
    hf_config: HFConfig
    dtype: str  # "float32", "bfloat16" or "float16"

    quantization: str | None = None  # the checkpoint's own, or what was asked for

    @property
    def pooling_kind(self) -> str | None:
        """See registry.pooling_kind."""
        return self.hf_config.pooling_kind or pooling_kind(self.hf_config.architectures)

    @property
    def is_encoder(self) -> bool:
        """Whether the architecture is an encoder."""
        return self.hf_config.is_encoder

    def longest_prompt(self, asked: int | str | None) -> int:
        """In tokens; unless more is asked for, what a sentence-transformers folder says."""
        longest = self.hf_config.max_context_len
        if asked not in (None, -1, "auto"):
            return longest
        said = sentence_length(self.path) or longest
        late = read_late_interaction(self.path, self.hf_config.raw)
        # max_seq_length of such folders is often that of the texts that were read last.
        return min(longest, said if late is None else max(said, late.longest))


def resolve_model(
    model: str | None,
    requested_dtype: str = "auto",
    device: str = "cpu",
    revision: str | None = None,
    hf_overrides: Overrides = None,
    use_tqdm: bool = False,
    needs_weights: bool = True,
    download_dir: str | None = None,
    hf_token: bool | str | None = None,
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    quantization: str | None = None,
    needs_tokenizer: bool = True,
    config_format: str = "auto",
    mmproj: str | None = None,
) -> ResolvedModel:
    """Find a model, converting or downloading it first if need be, and read its configuration.

    Args:
        model: folder, .gguf file (of a split model any part), hub name, or one with the type of a .gguf file in it
            ("owner/name:Q4_K_M") or its name ("owner/name/file.gguf"); None = the embedded model.
        requested_dtype: "auto", "float32", "bfloat16" or "float16". "auto" is the checkpoint's own; for GGUF it is
            bfloat16 where the device multiplies that fast, else float32. A GPU without bfloat16 gets float16 for it.
        device: "cpu" or "cuda".
        revision: branch, tag or commit of a hub name.
        hf_overrides: entries that replace those of config.json, or a function that changes transformers' configuration.
        needs_weights: False for a folder that may hold config.json alone; its dtype is then the one in that file, or
            float32.
        download_dir, hf_token: of the hub's client; see `download`.
        model_impl: see ModelConfig.
        trust_remote_code: let the folder's code run, where transformers' module is used.
        quantization: what the user said, see ModelConfig.
        needs_tokenizer: False where a .gguf file's own is not used.
        config_format: see `read_config`; of a folder.
        mmproj: the file of a .gguf model's picture tower.

    Raises:
        FileNotFoundError: no such model.
        ValueError: it cannot be used (the message names the file and the field), the GPU lacks the dtype, or the
            checkpoint is not quantised as `quantization` says.
    """
    source = _locate(model, revision, download_dir, hf_token)
    if mmproj and not source.is_file():
        raise ValueError(
            f"mmproj is for models that are .gguf files, and {source.name} is a folder, with its own tower"
        )
    if mmproj and not Path(mmproj).is_file():
        raise FileNotFoundError(f"mmproj {mmproj!r} is no file on this machine")
    if source.is_file():
        if config_format in CONFIG_FORMATS:
            raise ValueError(f"config_format={config_format!r} is of folders: {source.name} has its own header")
        check_gguf_quantization(quantization, source)
        dtype = _dtype_on(device, _fast_dtype(device), requested_dtype)
        keeps_blocks = needs_weights and _keeps_blocks(quantization, device)
        with needed_by("a .gguf file"):
            folder = converted_folder(source, dtype, use_tqdm, keeps_blocks, needs_tokenizer)
            if mmproj:
                folder = folder_with_tower(folder, source, Path(mmproj), dtype)
        try:
            config = _load_config(folder, hf_overrides, model_impl, trust_remote_code)
        except ValueError as error:
            raise ValueError(f"{source.name}: {error}") from error
    else:
        folder = source
        config = _load_config(folder, hf_overrides, model_impl, trust_remote_code, config_format, revision)
        stored = config.dtype
        if stored is None and requested_dtype == "auto" and needs_weights:
            stored = stored_dtype(shard_files(folder))
        dtype = _dtype_on(device, stored or "float32", requested_dtype)
    name = model_stem(sentence_folder(source))
    if model is not None and source.is_dir() and not Path(model).is_dir():
        name = model
    return ResolvedModel(name, folder, config, dtype, resolve_quantization(quantization, folder, config.raw))


def _locate(model: str | None, revision: str | None, download_dir: str | None, hf_token: bool | str | None) -> Path:
    """A .gguf file or a model folder on this machine."""
    if (found := local_model(model)) is not None:
        return found
    assert model is not None
    if (file := find_on_hub(model, revision, download_dir, hf_token)) is not None:
        return file
    check_hub_name(model)
    return first_module(download(model, revision, cache_dir=download_dir, token=hf_token))


def _load_config(
    folder: Path,
    overrides: Overrides,
    model_impl: str,
    trust_remote_code: bool,
    config_format: str = "auto",
    revision: str | None = None,
) -> HFConfig:
    replaced = overridden_entries(overrides, folder, trust_remote_code)
    raw, generation = read_config(folder, replaced, config_format, trust_remote_code, revision)
    if not raw.get("architectures"):
        raw = _with_architecture(raw, folder.name)
    if has_sparse_pooling(folder):
        raw = with_sparse_head(raw, f"{folder.name}/modules.json")
    entry = model_entry(raw.get("architectures") or (), model_impl, raw)
    if entry != TRANSFORMERS:
        model_class = import_model_class(entry)
        load_config = getattr(model_class, "load_config", None)
        if load_config is not None:
            return load_config(raw, folder, generation, trust_remote_code)
        resolve_config = getattr(model_class, "resolve_config", None)
        config = parse_hf_config(raw, generation, f"{folder.name}/config.json")
        return config if resolve_config is None else resolve_config(config)
    # Its import takes seconds.
    from vllm.models.transformers.build import load_transformers_config
    from vllm.models.transformers.encoder import find_encoder, load_encoder_config

    if find_encoder(raw) is not None:
        return load_encoder_config(raw, folder, trust_remote_code)
    return load_transformers_config(raw, folder, generation, trust_remote_code)


def _with_architecture(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """The model that transformers has for a file that names none: its language model, or the bare one of an encoder or
    of a kind without language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

    kind = str(raw.get("model_type"))
    found = base = MODEL_MAPPING_NAMES.get(kind)
    if base not in encoder_archs() or raw.get("is_decoder"):
        found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, base)
    if not isinstance(found, str) or "text_config" in raw:
        return raw
    warn_once(logger, f"{name}/config.json names no architecture: its model_type {kind!r} runs as {found}")
    return {**raw, "architectures": [found]}


def _keeps_blocks(quantization: str | None, device: str) -> bool:
    """Whether a GGUF file's weights stay as they are. Unless that is asked for, only on the CPU, by our kernels."""
    if quantization is not None or envs.gguf_dequantize():
        return quantization == "gguf"
    return device == "cpu" and cpu_kernel_isa() is not None


def _fast_dtype(device: str) -> str:
    return "bfloat16" if device == "cuda" or {"avx512_bf16", "amx_bf16"} & _cpu_flags() else "float32"


def _dtype_on(device: str, dtype: str, requested: str) -> str:
    """The requested dtype, for "auto" `dtype`, or float16 where that is bfloat16 and the GPU lacks it."""
    dtype = dtype if requested == "auto" else requested
    if dtype != "bfloat16" or device != "cuda" or cuda_has_bfloat16():
        return dtype
    if requested == dtype:
        raise ValueError(
            "dtype='bfloat16' needs a GPU of compute capability 8.0 or above: use float16, which has its precision but "
            "not its range, or float32"
        )
    warn_once(logger, "the GPU has no bfloat16 (compute capability below 8.0): the model runs in float16")
    return "float16"


def _cpu_flags() -> set[str]:
    """Instruction sets that the kernel reports; empty where it does not."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith("flags"):
                return set(line.split(":", 1)[1].split())
    return set()
