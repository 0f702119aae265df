"""A GGUF file as an ordinary Hugging Face folder, converted once and kept in the user's cache. What the folder would
have byte by byte stays in the file: see mapped_tensors.py."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm import envs
from vllm.config.checkpoint.local_model import all_parts
from vllm.config.checkpoint.mapped_tensors import Place, add_files, file_identity, write_list
from vllm.config.checkpoint.shards import LIST_NAME, TOWER_NAME
from vllm.config.checkpoint.weight_files import check_range, progress_bar
from vllm.loader.gguf.architectures import ARCHITECTURES, REFUSED
from vllm.loader.gguf.changes import EVERYWHERE, Weight, stacked
from vllm.loader.gguf.config_parts import NULL, Config
from vllm.loader.gguf.encoders import DENSE, classifier, write_pooling
from vllm.loader.gguf.file import GGUFFile
from vllm.loader.gguf.header import GGUFHeader
from vllm.loader.gguf.mmproj import whole_model
from vllm.loader.gguf.special import sampling, special_ids
from vllm.loader.gguf.tokenizer import MORE_TEMPLATES, write_tokenizer
from vllm.loader.gguf.unread import check_unread
from vllm.logger import init_logger
from vllm.quantization.formats.gguf import FLOATS, TYPES, tensor_name

logger = init_logger(__name__)

# Increase when what a conversion writes changes: older copies are then not used.
_FORMAT = 13
_WEIGHTS = "model.safetensors"
_NUM_THREADS = 2
_WITH_TOWER = "-mmproj-"  # in the names of folders
# Tensors that are added to others, not multiplied with.
_ADDED = ("position_embd", "token_types")
# Values that choose experts, and those of states, keep float32, as in checkpoints.
_FLOAT32 = (".exp_probs_b.bias", ".ssm_a", ".ssm_d", ".ssm_dt.bias")


def converted_folder(
    path: Path, dtype: str, use_tqdm: bool = False, keeps_blocks: bool = False, needs_tokenizer: bool = True
) -> Path:
    """The folder for the weights of the .gguf file (or of all files that it is a part of) in `dtype` ("float32",
    "bfloat16" or "float16"), its configuration and tokenizer; made if missing. With `keeps_blocks`, quantised weights
    have the file's bytes (quantization/formats/gguf.py); without `needs_tokenizer`, one that cannot be had is left
    out. Of concurrent processes' copies the first to be finished becomes the folder. ValueError for a file that is not
    GGUF, is cut, or not supported; OSError if the cache cannot be read or written."""
    root = envs.cache_root() / "gguf"
    try:
        root.mkdir(parents=True, exist_ok=True)
        digest = _model_sha256(path, root)
        folder = root / f"{digest[:32]}-v{_FORMAT}" / (f"{dtype}-blocks" if keeps_blocks else dtype)
        if not (folder / _WEIGHTS).is_file():
            logger.info("converting %s to %s in %s", path.name, dtype, folder)
            folder.parent.mkdir(exist_ok=True)
            with _becoming(folder) as temporary:
                _convert(path, dtype, temporary, folder.parent, use_tqdm, keeps_blocks, needs_tokenizer)
        if (folder / LIST_NAME).is_file():
            add_files(folder / LIST_NAME, [file_identity(part) for part in all_parts(path)])
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        message = f"the cache folder cannot be used ({error}); VLLM_CACHE_ROOT names another one"
        raise PermissionError(message) from error
    if needs_tokenizer and not (folder / "tokenizer.json").is_file():
        # A conversion that did without it.
        _add_tokenizer(GGUFFile(path), folder)
    return folder


def folder_with_tower(decoder: Path, model: Path, mmproj: Path, dtype: str) -> Path:
    """The folder of `decoder`, which `converted_folder` made of the .gguf file `model`, with the picture tower of
    another file; made if missing. Errors as there."""
    digest = _remembered_sha256(mmproj, envs.cache_root() / "gguf")
    folder = decoder.with_name(f"{decoder.name}{_WITH_TOWER}{digest[:16]}")
    own = {"config.json", "tokenizer_config.json"}
    text = json.loads((decoder / "config.json").read_text(encoding="utf-8"))
    file = GGUFFile(mmproj)
    whole = whole_model(file, GGUFFile(model), text)
    if not (folder / _WEIGHTS).is_file():
        with _becoming(folder) as temporary:
            planned = [_Planned(weight, file, getattr(torch, dtype), False) for weight in whole.weights]
            _write_weights(planned, temporary / TOWER_NAME, False)
            for name, content in {"config.json": whole.config, **whole.processor}.items():
                _write_json(temporary / name, content)
            _link_others(decoder, temporary, own)
    # The decoder's tokenizer may have come later.
    _link_others(decoder, folder, own)
    source, target = decoder / "tokenizer_config.json", folder / "tokenizer_config.json"
    if source.is_file() and not target.is_file():
        _write_json(target, json.loads(source.read_text(encoding="utf-8")) | whole.tokenizer)
    return folder


def _link_others(decoder: Path, folder: Path, own: set[str]) -> None:
    for item in decoder.iterdir():
        if item.name not in own:
            with contextlib.suppress(FileExistsError):
                (folder / item.name).symlink_to(Path("..", decoder.name, item.name))


def _convert(
    path: Path, dtype: str, folder: Path, siblings: Path, use_tqdm: bool, keeps_blocks: bool, needs_tokenizer: bool
) -> None:
    file = GGUFFile(path)
    config = hf_config(file, dtype)
    has_blocks = keeps_blocks and ARCHITECTURES[file.metadata["general.architecture"]].keeps_blocks
    planned = [_Planned(weight, file, getattr(torch, dtype), has_blocks) for weight in weights(file)]
    if has_blocks:
        heads = dict(tensor.heads for tensor in planned if tensor.heads is not None)
        config["quantization_config"] = {"quant_method": "gguf"} | ({"input_heads": heads} if heads else {})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special_ids(file) | sampling(file))
    if not _copy_tokenizer(siblings, folder):
        with contextlib.nullcontext() if needs_tokenizer else contextlib.suppress(ValueError):
            _write_tokenizer(file, folder)
    write_pooling(file, folder)
    widened = sorted({tensor.kind for tensor in planned if keeps_blocks and tensor.is_widened})
    if widened:
        logger.warning("%s: tensors of %s are de-quantised to %s", path.name, ", ".join(widened), dtype)
    parts = all_parts(path)
    places = {tensor.name: place for tensor in planned if (place := tensor.place(parts)) is not None}
    if places:
        write_list(folder / LIST_NAME, [file_identity(part) for part in parts], places)
    _write_weights([tensor for tensor in planned if tensor.name not in places], folder / _WEIGHTS, use_tqdm)


class _Planned:
    """A tensor of the folder."""

    def __init__(self, weight: Weight, file: GGUFFile, dtype: torch.dtype, keeps_blocks: bool) -> None:
        from gguf import GGMLQuantizationType

        self._weight, self._file, ggml_type = weight, file, weight.ggml_type(file)
        self.kind = GGMLQuantizationType(ggml_type).name
        is_matrix = len(weight.shape) == 2 and not weight.tensor.startswith(_ADDED)
        self.name, self.shape = weight.name, weight.shape
        self.dtype = dtype = torch.float32 if weight.tensor.endswith(_FLOAT32) else dtype
        is_same = ggml_type in FLOATS and FLOATS[ggml_type][1] == dtype
        can_be_kept = is_same or (keeps_blocks and ggml_type in TYPES | FLOATS)
        self._is_kept = can_be_kept and is_matrix and weight.keeps_rows
        self.is_widened = not self._is_kept and self.kind not in ("F32", "F16", "BF16")
        if self._is_kept and ggml_type in FLOATS:
            self.dtype = FLOATS[ggml_type][1]
        elif self._is_kept:
            block, num_bytes = TYPES[ggml_type][1:3]
            self.shape, self.dtype = (weight.shape[0], weight.shape[1] // block * num_bytes), torch.uint8
        if self.dtype != dtype:
            self.name = f"{weight.name.removesuffix('.weight')}.{tensor_name(ggml_type)}"

    @property
    def heads(self) -> tuple[str, tuple[int, int]] | None:
        """A module whose blocks have inputs in the file's order, and the heads of these."""
        heads = self._weight.heads if self._is_kept else None
        return None if heads is None else (self._weight.name.removesuffix(".weight"), heads)

    def place(self, files: list[Path]) -> Place | None:
        """Where in one of the `files` it is as it is; None: nowhere, or where no tensor may begin."""
        weight = self._weight
        if not self._is_kept or (weight.change is not None and weight.heads is None) or weight.others:
            return None
        tensor, dtype = self._file.tensors[weight.tensor], str(self.dtype).removeprefix("torch.")
        row_bytes = tensor.num_bytes // math.prod(tensor.shape[:-1])
        start = tensor.start + (0 if weight.rows is None else weight.rows.start or 0) * row_bytes
        return None if start % self.dtype.itemsize else Place(files.index(tensor.file), start, self.shape, dtype)

    def load(self) -> torch.Tensor:
        """The tensor, in its shape and dtype. ValueError: a value is too large for that."""
        value = self._weight.blocks(self._file) if self._is_kept else self._weight.load(self._file)
        tensor = torch.from_numpy(np.require(value, requirements=["W", "C"]))
        if self._is_kept:
            return tensor.view(self.dtype)
        try:
            check_range(tensor, self.dtype)
        except ValueError as error:
            raise ValueError(f"{self._file.path.name}: tensor {self._weight.tensor} {error}") from None
        return tensor.to(self.dtype)


def _write_weights(planned: list[_Planned], target: Path, use_tqdm: bool) -> None:
    """A few tensors at a time, so that memory stays far below the model's size."""
    with (
        SafetensorsWriter(target, {tensor.name: (tensor.shape, tensor.dtype) for tensor in planned}) as writer,
        ThreadPoolExecutor(_NUM_THREADS) as pool,
        progress_bar("Converting GGUF", len(planned), use_tqdm) as bar,
    ):
        pending: list[Future[torch.Tensor]] = []
        remaining = iter(planned)
        for _ in planned:
            while len(pending) < 2 * _NUM_THREADS and (tensor := next(remaining, None)) is not None:
                pending.append(pool.submit(tensor.load))
            writer.write(pending.pop(0).result())
            bar.update()


@contextlib.contextmanager
def _becoming(folder: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `folder` at the end, unless another process did so first."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / _WEIGHTS).is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tokenizer(file: GGUFFile, folder: Path) -> None:
    try:
        write_tokenizer(file, folder)
    except ValueError as error:
        raise ValueError(f"{error}; tokenizer= may name a folder with the model's own") from error


def _add_tokenizer(file: GGUFFile, folder: Path) -> None:
    """To a folder that other processes may read: the file that they look for comes last."""
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
        _write_tokenizer(file, Path(temporary))
        for item in sorted(Path(temporary).iterdir(), key=lambda path: path.name == "tokenizer.json"):
            with contextlib.suppress(OSError):  # another process was faster
                item.rename(folder / item.name)


def _copy_tokenizer(siblings: Path, folder: Path) -> bool:
    """Take the tokenizer of the same file's conversion to another dtype, if there is one."""
    for other in siblings.iterdir():
        if other.name.startswith(".") or _WITH_TOWER in other.name or not (other / "tokenizer.json").is_file():
            continue
        for item in other.iterdir():
            if item.name.startswith(("tokenizer", "special_tokens", "chat_template")):
                shutil.copyfile(item, folder / item.name)
            elif item.name == MORE_TEMPLATES:
                shutil.copytree(item, folder / item.name)
        return True
    return False


def _model_sha256(path: Path, root: Path) -> str:
    """The file's hash; of several that a model is split into, the hash of theirs."""
    digests = [_remembered_sha256(part, root) for part in all_parts(path)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _remembered_sha256(path: Path, root: Path) -> str:
    """A file's hash, computed once for a path, size and modification time."""
    path = path.resolve()
    stat = path.stat()
    identity = [str(path), stat.st_size, stat.st_mtime_ns]
    note = root / "hashes" / (hashlib.sha256(str(path).encode()).hexdigest()[:32] + ".json")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        remembered = json.loads(note.read_text(encoding="utf-8"))
        if remembered["identity"] == identity:
            return str(remembered["sha256"])
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while chunk := data.read(1 << 22):
            digest.update(chunk)
    note.parent.mkdir(exist_ok=True)
    temporary = note.with_name(f"{note.name}.{os.getpid()}")
    _write_json(temporary, {"identity": identity, "sha256": digest.hexdigest()})
    temporary.replace(note)
    return digest.hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


# A block's number, the part, the number of a single expert, and the ending.
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(.+?)(?:\.(\d+))?(?:\.(weight|bias|scale))?")
# Read as part of the configuration, or following from it.
_UNREAD = re.compile(r"(rope_freqs|rope_factors_long|rope_factors_short)\.weight|(blk\.\d+\.)?attn_rot_embd\..*")


def weights(file: GGUFFile) -> Iterator[Weight]:
    """Every weight of the checkpoint; ValueError for a tensor that the architecture does not have."""
    header = GGUFHeader(file)
    row = ARCHITECTURES[header.architecture]
    changes = EVERYWHERE | row.changes
    for tensor, entry in file.tensors.items():
        match = _TENSOR.fullmatch(tensor)
        layer, part, expert, ending = match.groups() if match is not None else (None, tensor, None, None)
        if _UNREAD.fullmatch(tensor) or part in DENSE or (layer is not None and int(layer) in header.further):
            continue
        name = row.names.find(layer, part, expert, ending)
        if name is None:
            raise header.error(f"{header.architecture} has no tensor {tensor}")
        is_norm = part.endswith("norm") and ending == "weight"
        change = changes.get(part) or (changes.get("norm") if is_norm else None) or (stacked if "{}" in name else None)
        weight = Weight(name, entry.shape, tensor)
        yield from (weight,) if change is None else change(header, weight)
    if row.further is not None:
        yield from row.further(header)


def hf_config(file: GGUFFile, dtype: str) -> Config:
    """The contents of config.json; ValueError for an unsupported architecture, or a value that the header lacks."""
    architecture = file.metadata.get("general.architecture", "")
    if (kind := file.metadata.get("general.type", "model")) != "model":
        beside = "; it is passed as mmproj, beside its text decoder" if kind == "mmproj" else ""
        raise ValueError(f"{file.path.name}: general.type must be model, got {kind!r}{beside}")
    if (reason := REFUSED.get(architecture)) is not None:
        raise ValueError(f"{file.path.name}: general.architecture={architecture} is not supported: {reason}")
    if (row := ARCHITECTURES.get(architecture)) is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"{file.path.name}: general.architecture must be one of {known}, got {architecture!r}")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path.name} has no tensor token_embd.weight")
    header = GGUFHeader(file)
    config = {
        "architectures": [row.name],
        "model_type": row.model_type,
        "dtype": dtype,
        "vocab_size": header.rows("token_embd.weight"),
        "tie_word_embeddings": not header.has("output.weight"),
        **row.config(header),
        **special_ids(file),
    }
    _check_rotated(header, config)
    config = classifier(header, config)
    if row.is_causal and header.get("attention.causal", True) is False:
        config["is_causal"] = False
    check_unread(header, config)
    return {key: None if value is NULL else value for key, value in config.items() if value is not None}


def _check_rotated(h: GGUFHeader, config: Config) -> None:
    """ValueError: the header rotates a part of each head in an architecture that rotates all of it."""
    rope = config.get("rope_parameters") or {}
    ropes = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    is_whole = "qk_rope_head_dim" not in config and any("partial_rotary_factor" not in rope for rope in ropes)
    if is_whole and (rotated := h.get("rope.dimension_count", h.head_dim)) != h.head_dim:
        raise h.wrong("rope.dimension_count", f"must be the size of a head, {h.head_dim}, got {rotated!r}")


_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


class SafetensorsWriter:
    """Writes one file whose tensors come one at a time, in the order of `tensors`: by name, their shapes and dtypes
    (float32, bfloat16, float16 or uint8)."""

    def __init__(self, path: Path, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._remaining = list(tensors.values())[::-1]
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in tensors.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # aligns the data that follows
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: Tensor) -> None:
        shape, dtype = self._remaining.pop()
        assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self._file.close()
        assert error is not None or not self._remaining
