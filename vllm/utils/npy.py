"""Arrays as .npy files in texts."""

from __future__ import annotations

import base64
import io

import numpy as np

from vllm.exceptions import VLLMValidationError

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def npy(array: np.ndarray) -> bytes:
    """The array as a .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def npy_base64(array: np.ndarray) -> str:
    """The array as a .npy file, in base64."""
    return base64.b64encode(npy(array)).decode()


def array_of_npy(name: str, text: str) -> np.ndarray:
    """The 2-d array of a .npy file in base64; VLLMValidationError: it is none, by the field's `name`."""
    try:
        data = base64.b64decode(text, validate=True)
        file = io.BytesIO(data)
        shape, is_fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
        array = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran else "C")
    except (ValueError, KeyError, TypeError, OverflowError):
        raise VLLMValidationError(f"{name}: the text is not a .npy file in base64", name, text[:32]) from None
    if array.ndim != 2:
        message = f"{name}: the array must be of two dimensions, got {array.ndim}"
        raise VLLMValidationError(message, name, array.ndim)
    return array
