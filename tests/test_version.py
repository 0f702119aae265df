"""The package is known as `vllm`, at the version of the upstream release whose interface it follows."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.version import Version

import vllm
import vllm.version


def test_distribution_and_module_agree() -> None:
    assert metadata.version("vllm") == vllm.__version__ == vllm.version.__version__
    assert "vllm" in metadata.packages_distributions()["vllm"]


def test_the_tuple_is_the_version() -> None:
    release, local = vllm.__version_tuple__[:3], vllm.__version_tuple__[3]
    assert ".".join(map(str, release)) + f"+{local}" == vllm.__version__


@pytest.mark.parametrize("least", ["0.3.0", "0.8.3", "0.9.0", "0.22.0", "0.28.0", "0.30.0", "0.33.0"])
def test_gates_of_callers_are_passed(least: str) -> None:
    version = Version(metadata.version("vllm"))
    assert version >= Version(least)
    assert Version(version.base_version) >= Version(least)
    assert not version.is_prerelease
