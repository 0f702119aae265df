"""Upstream's paths of models, layers and quantisation: aliases of the modules here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# Prefixes of an old path, and what may stand there instead; the first that exists is it.
_MOVED = {
    "vllm.model_executor.layers.quantization.layer_parameters": ("vllm.layers.parameter_slots",),
    "vllm.model_executor.models.transformers_": ("vllm.models.transformers.",),
    "vllm.model_executor.models": ("vllm.models", "vllm.models.dense", "vllm.models.encoders"),
    "vllm.model_executor.layers.quantization": ("vllm.quantization", "vllm.quantization.formats"),
    "vllm.model_executor.layers.": ("vllm.layers.",),
}


class _Aliases(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        prefix = next((prefix for prefix in _MOVED if fullname.startswith(prefix)), None)
        if prefix is None:
            return None
        rest = fullname.removeprefix(prefix)
        for room in _MOVED[prefix]:
            if "." not in rest.removeprefix(".") and (found := find_spec(room + rest)) is not None:
                is_package = found.submodule_search_locations is not None
                return ModuleSpec(fullname, self, origin=room + rest, is_package=is_package)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None and spec.origin is not None
        found = importlib.import_module(spec.origin)
        if spec.submodule_search_locations is None:
            sys.modules[spec.name] = found
        else:  # a package's path would find its modules once more, under their old names
            module.__dict__.update((name, value) for name, value in vars(found).items() if not name.startswith("__"))


# Before the others: a folder of which only compiled files are left would be found as a package.
sys.meta_path.insert(0, _Aliases())
