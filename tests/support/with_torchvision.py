"""Runs tests in a process with torchvision and timm, or a stub of the former: `python with_torchvision.py ARGUMENTS`
has pytest's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torchvision_stub

FOLDER = Path(sys.prefix) / "pictures"
"""Has both packages, where `make test` has installed them."""


def install() -> None:
    """Let `import torchvision` succeed."""
    if not FOLDER.is_dir():
        torchvision_stub.install()
        return
    import torch

    # Its own operators are of another build of torch, and it asks for two of these when it is imported.
    global _operators
    _operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(str(FOLDER))


if __name__ == "__main__":
    import pytest

    install()
    sys.exit(pytest.main(sys.argv[1:]))
