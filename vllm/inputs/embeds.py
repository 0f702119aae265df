"""Embeddings in place of a prompt's tokens: checked, and read from what torch.save has written.

The pickle within such a file is looked through before anything of it is run or allocated: torch.load would inflate what
is compressed, and make dense what is sparse."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import pickletools
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.exceptions import VLLMValidationError, shown

if TYPE_CHECKING:
    import torch

FIELD = "prompt_embeds"
FLOATS = ("float32", "float16", "bfloat16")
"""The dtypes of embeddings."""
INTEGERS = ("int64", "int32")
"""The dtypes of sizes."""
_STORAGES = {
    "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16", "LongStorage": "int64",
    "IntStorage": "int32",
}  # fmt: skip
_REBUILDERS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
_MAX_PICKLE_BYTES = 1 << 16
_MAX_OTHER_BYTES = 1 << 20  # of names, versions and padding in a file, beside its tensor


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """The embeddings of some of a prompt's positions.

    Attributes:
        rows: [N, W] in the model's dtype, on the CPU.
        positions: int64 [N], increasing.
        digest: names all of this for the prefix cache.
    """

    rows: torch.Tensor
    positions: np.ndarray
    digest: str

    @classmethod
    def of(cls, tensor: Any, is_token: Sequence[bool] | None, width: int, longest: int, dtype: str) -> PromptEmbeds:
        """
        Args:
            tensor: [T, W] or [1, T, W], floating point.
            is_token: where the prompt has tokens, T values; None: nowhere.
            width: W of the model.
            longest: the most positions of a prompt.
            dtype: the model's.

        Raises:
            VLLMValidationError: any of this does not hold, or a value is not finite.
        """
        _check_tensor(tensor, width, longest)
        if tensor.dim() == 3:
            tensor = tensor[0]
        is_given = np.ones(len(tensor), dtype=bool) if is_token is None else ~_as_mask(is_token, len(tensor))
        positions = np.flatnonzero(is_given)
        import torch

        # A copy, which the caller's changes do not reach.
        rows = tensor.detach().to("cpu", getattr(torch, dtype), copy=True)[torch.from_numpy(positions)].contiguous()
        if not torch.isfinite(rows).all():
            raise VLLMValidationError(f"{FIELD} has values that are not finite in {dtype}, the model's dtype", FIELD)
        return cls(rows, positions, _digest(rows, positions))

    def pack(self) -> tuple[str, int, bytes, bytes]:
        """The parts that `unpack` makes it of, for another process."""
        import torch

        dtype = str(self.rows.dtype).removeprefix("torch.")
        data = self.rows.view(torch.uint8).numpy().tobytes()
        return self.digest, self.rows.shape[1], dtype.encode(), self.positions.tobytes() + data

    @classmethod
    def unpack(cls, digest: str, width: int, dtype: bytes, data: bytes) -> PromptEmbeds:
        """The inverse of `pack`."""
        import torch

        kind: torch.dtype = getattr(torch, dtype.decode())
        num_rows = len(data) // (8 + width * kind.itemsize)
        positions = np.frombuffer(data, np.int64, num_rows)
        rows = torch.frombuffer(bytearray(memoryview(data)[8 * num_rows :]), dtype=kind) if num_rows else torch.empty(0)
        return cls(rows.view(num_rows, width), positions, digest)


def load_embeds(text: Any, width: int, longest: int) -> torch.Tensor:
    """The tensor in a file that torch.save has written, in base64: [T, W] or [1, T, W].

    Raises:
        VLLMValidationError: it is anything else, or more than `longest` rows of `width` values.
    """
    tensor = load_tensor(FIELD, text, longest * width)
    _check_tensor(tensor, width, longest)
    return tensor


def load_tensor(name: str, text: Any, most: int, dtypes: Sequence[str] = FLOATS) -> torch.Tensor:
    """The tensor in a file that torch.save has written, in base64.

    Args:
        name: the field, in errors.
        most: values that it may have.
        dtypes: that it may be of.

    Raises:
        VLLMValidationError: it is anything else.
    """
    import torch

    most_bytes = most * max(getattr(torch, dtype).itemsize for dtype in dtypes) + _MAX_OTHER_BYTES
    if not isinstance(text, str):
        raise VLLMValidationError(f"{name} must be a text in base64, got {shown(text)}", name)
    # Four letters are three bytes.
    if len(text) > 4 * (most_bytes // 3 + 1):
        message = f"{name} has {len(text)} letters of base64; {most} values are at most {most_bytes} bytes"
        raise VLLMValidationError(message, name)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise VLLMValidationError(f"{name} is not base64: {error}", name) from None
    _check_file(name, data, most_bytes, dtypes)
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # a damaged file fails in many ways
        raise VLLMValidationError(f"{name} is no tensor that torch.save has written", name) from None
    if not isinstance(tensor, torch.Tensor):
        raise VLLMValidationError(f"{name} must be a tensor, got {type(tensor).__name__}", name)
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        message = f"{name} has values of {tensor.nbytes} bytes in a file with fewer: save tensor.contiguous()"
        raise VLLMValidationError(message, name)
    return tensor


def _check_file(name: str, data: bytes, most: int, dtypes: Sequence[str]) -> None:
    """Raises VLLMValidationError unless it is an archive that holds nothing but a dense tensor."""
    problem = f"{name} must be what torch.save writes of a tensor: "
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        entries = archive.infolist()
    except Exception:  # a damaged file fails in many ways
        raise VLLMValidationError(f"{problem}it is no zip archive", name) from None
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise VLLMValidationError(f"{problem}parts of it are compressed", name)
    if sum(entry.file_size for entry in entries) > most:
        raise VLLMValidationError(f"{problem}its parts are larger than the file", name)
    pickles = [entry for entry in entries if entry.filename.rpartition("/")[2].endswith(".pkl")]
    if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE_BYTES:
        raise VLLMValidationError(f"{problem}it holds no single small pickle", name)
    try:
        codes = list(pickletools.genops(archive.read(pickles[0])))
    except Exception:  # a damaged pickle fails in many ways
        raise VLLMValidationError(f"{problem}its pickle is damaged", name) from None
    if any(code.proto > 2 or code.name in ("INST", "OBJ") or code.name.startswith("EXT") for code, _, _ in codes):
        raise VLLMValidationError(f"{problem}its pickle is not of protocol 2", name)
    for other in (what for code, what, _ in codes if code.name == "GLOBAL" and what not in _REBUILDERS):
        module, _, storage = str(other).partition(" ")
        if module == "torch" and storage.endswith("Storage"):
            if _STORAGES.get(storage) not in dtypes:
                raise VLLMValidationError(f"{name} must be of {_list(dtypes)}, got a {storage}", name)
        else:
            raise VLLMValidationError(f"{problem}it refers to {str(other).replace(' ', '.')}", name)


def _check_tensor(tensor: Any, width: int, longest: int) -> None:
    """Raises VLLMValidationError unless it is a dense one of a shape and dtype that the model takes."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise VLLMValidationError(f"{FIELD} must be a tensor [T, {width}], got {type(tensor).__name__}", FIELD)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in FLOATS:
        raise VLLMValidationError(f"{FIELD} must be of {_list(FLOATS)}, got {dtype}", FIELD)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise VLLMValidationError(f"{FIELD} must be a dense tensor, got one of layout {tensor.layout}", FIELD)
    shape = list(tensor.shape)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] != 1) or shape[-1] != width:
        message = f"{FIELD} must have the shape [T, {width}], as the model's embeddings are {width} wide; got {shape}"
        raise VLLMValidationError(message, FIELD, shape)
    if not 0 < shape[-2] <= longest:
        message = f"{FIELD} must have 1 to {longest} rows (max_model_len: the maximum context length), got {shape[-2]}"
        raise VLLMValidationError(message, FIELD, shape[-2])


def _as_mask(is_token: Any, length: int) -> np.ndarray:
    """bool [length]"""
    values = is_token.tolist() if hasattr(is_token, "tolist") else is_token
    name = "prompt_is_token_ids"
    if not isinstance(values, Sequence) or not all(isinstance(value, bool) for value in values):
        raise VLLMValidationError(f"{name} must be a list of booleans, got {shown(is_token)}", name)
    if len(values) != length:
        message = f"{name} must have a value for each of the {length} rows of {FIELD}, got {len(values)}"
        raise VLLMValidationError(message, name, len(values))
    return np.asarray(values, dtype=bool)


def _digest(rows: Any, positions: np.ndarray) -> str:
    import torch

    content = hashlib.blake2b(positions.tobytes(), digest_size=16)
    content.update(f"{rows.dtype} {tuple(rows.shape)}".encode())
    content.update(rows.view(torch.uint8).numpy().data)
    return content.hexdigest()


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
