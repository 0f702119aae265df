"""The part of torchvision that transformers' processors call, made of torch, for a process where it is missing.

transformers looks for torchvision when it is imported: `install` comes before that, in a process of its own.
"""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class InterpolationMode(enum.Enum):
    """torchvision's names of filters."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def resize(image: Tensor, size: Sequence[int], interpolation: Any = None, antialias: bool = True) -> Tensor:
    """[..., H, W] of another size, as torchvision's: bytes are rounded and stay bytes."""
    mode = "bilinear" if interpolation is InterpolationMode.BILINEAR else "bicubic"
    flat = image.reshape(-1, *image.shape[-3:]).float()
    made = F.interpolate(flat, size=list(size), mode=mode, antialias=antialias)
    if image.dtype == torch.uint8:
        made = made.round().clamp(0, 255).to(torch.uint8)
    return made.reshape(*image.shape[:-2], *size)


def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    """[..., C, H, W] less its mean, by its deviation."""
    mean, std = (torch.as_tensor(each, dtype=image.dtype).reshape(-1, 1, 1) for each in (mean, std))
    return (image - mean) / std


def grayscale_to_rgb(image: Tensor) -> Tensor:
    """[..., 3, H, W] of [..., 1 or 3, H, W]"""
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:]) if image.shape[-3] == 1 else image


def pad(image: Tensor, padding: Sequence[int], fill: Any = 0, padding_mode: str = "constant") -> Tensor:
    """[..., C, H, W] with a border: left, top, right, bottom."""
    left, top, right, bottom = padding
    height, width = image.shape[-2:]
    values = torch.as_tensor(fill, dtype=image.dtype).reshape(-1, 1, 1)
    made = values.expand(*image.shape[:-2], top + height + bottom, left + width + right).clone()
    made[..., top : top + height, left : left + width] = image
    return made


def install() -> None:
    """Let `import torchvision` find this where there is none."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    functional = types.ModuleType("torchvision.transforms.v2.functional")
    for each in (InterpolationMode, resize, normalize, grayscale_to_rgb, pad):
        setattr(functional, each.__name__, each)
    functional.pil_to_tensor = None  # imported by name, never called
    names = ("", ".transforms", ".transforms.functional", ".transforms.v2", ".io")
    made = {f"torchvision{name}": types.ModuleType(f"torchvision{name}") for name in names}
    made["torchvision.transforms.functional"] = functional
    made[functional.__name__] = functional
    for name, module in made.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    made["torchvision"].__version__ = "0.28.0"
    made["torchvision.transforms"].InterpolationMode = InterpolationMode


def install_number_words() -> None:
    """The same of num2words, by which SmolVLM's processor writes how many frames there are: digits."""
    if importlib.util.find_spec("num2words") is None:
        module = types.ModuleType("num2words")
        module.num2words = lambda number: str(number)
        module.__spec__ = importlib.machinery.ModuleSpec("num2words", None)
        sys.modules["num2words"] = module
