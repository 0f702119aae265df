"""Runs tests in a process that has torchvision or its stub: `python with_torchvision.py PYTEST_ARGUMENT ...`"""

from __future__ import annotations

import sys

import torchvision_stub

torchvision_stub.install()

if __name__ == "__main__":
    import pytest

    sys.exit(pytest.main(sys.argv[1:]))
