"""Loaders of callers: what upstream's `register_model_loader` takes. The engine builds a model; a loader fills it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.config.checkpoint.shards import shard_files
from vllm.config.checkpoint.weight_files import iterate_tensors
from vllm.config.load import OTHER_FORMATS
from vllm.loader import LOADERS
from vllm.loader.weights import fill_with_noise, load_weights
from vllm.logger import init_logger
from vllm.upstream.config.load import LoadConfig
from vllm.upstream.outside.model import OutsideModel
from vllm.upstream.outside.views import View, VllmConfigView, transformers_config, view_of
from vllm.upstream.utils.unserved import refuse

logger = init_logger(__name__)

_L = TypeVar("_L", bound="type[BaseModelLoader]")

# The model that is being filled, and the engine's own class of it.
_built: ContextVar[tuple[nn.Module, Any] | None] = ContextVar("built_model", default=None)


class BaseModelLoader(ABC):
    """Fills models with weights.

    Attributes:
        load_config: `load_format` and `model_loader_extra_config` are the engine's arguments.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None:
        """Make a model's files be there."""

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Fill `model`, by its `load_weights` or parameter by parameter. Those of a model of the engine's own have the
        names of its modules, and its `load_weights` takes all tensors of a checkpoint in one call."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """The model that the engine has built, filled.

        Raises:
            NotImplementedError: it is called apart from an engine's start.
        """
        built = _built.get()
        if built is None:
            refuse("load_model", "a loader is asked by the engine, which has built the model: start one by load_format")
        self.load_weights(built[0], model_config)
        return built[0]


class DefaultModelLoader(BaseModelLoader):
    """Reads a folder's safetensors."""

    @dataclass
    class Source:
        """Where tensors come from; `prefix` is put before their names."""

        model_or_path: str
        revision: str | None = None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list[str] | None = None

    counter_before_loading_weights: float = 0.0

    def download_model(self, model_config: Any) -> None:
        """Nothing: the engine has."""

    def _get_weights_iterator(self, source: Source) -> Generator[tuple[str, Tensor], None, None]:
        for name, tensor in iterate_tensors(shard_files(Path(source.model_or_path))):
            yield source.prefix + name, tensor

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Generator[tuple[str, Tensor], None, None]:
        """The checkpoint's tensors by their names."""
        yield from self._get_weights_iterator(self.Source(model_config.path, model_config.revision))
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """See BaseModelLoader. ValueError: the checkpoint lacks a weight."""
        load: Any = model.load_weights
        loaded = load(self.get_all_weights(model_config, model))
        if loaded is not None:
            _check_all(model, loaded)


class DummyModelLoader(BaseModelLoader):
    """Makes weights up."""

    def download_model(self, model_config: Any) -> None:
        """Nothing: there is nothing to read."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """See BaseModelLoader."""
        built = _built.get()
        fill_with_noise(model if built is None else built[1], model_config.seed)


def _check_all(model: nn.Module, loaded: Iterable[str]) -> None:
    lacking = sorted({name for name, _ in model.named_parameters()} - set(loaded))
    if lacking:
        raise ValueError(f"the loader's checkpoint lacks weights: {', '.join(lacking[:5])}")


class _Formats(dict[str, type[BaseModelLoader]]):
    """By load_format. Upstream's callers look whether theirs is in it."""

    def __setitem__(self, name: str, loader: type[BaseModelLoader]) -> None:
        super().__setitem__(name, loader)
        OTHER_FORMATS.add(name)
        LOADERS[name] = _Filler(loader)


_LOAD_FORMAT_TO_MODEL_LOADER = _Formats()


def register_model_loader(load_format: str) -> Callable[[_L], _L]:
    """A class decorator: `load_format` is served by the class from now on and in this process; with several, register
    it in a plug-in. One that is registered already is replaced, with a warning.

    Raises:
        ValueError: the class is no BaseModelLoader, or the engine has this format itself.
    """

    def add(loader: _L) -> _L:
        if not (isinstance(loader, type) and issubclass(loader, BaseModelLoader)):
            raise ValueError(f"register_model_loader: the loader must be a subclass of BaseModelLoader, got {loader!r}")
        if load_format in ("auto", "dummy"):
            raise ValueError(f"register_model_loader: load_format={load_format!r} is the engine's own: choose another")
        if _LOAD_FORMAT_TO_MODEL_LOADER.get(load_format, loader) is not loader:
            logger.warning("load_format %s was registered already: now %s serves it", load_format, loader)
        _LOAD_FORMAT_TO_MODEL_LOADER[load_format] = loader
        return loader

    return add


def get_model_loader(load_config: LoadConfig) -> BaseModelLoader:
    """The loader of load_config.load_format. ValueError: there is none."""
    name = load_config.load_format
    if name == "dummy":
        return DummyModelLoader(load_config)
    if name in _LOAD_FORMAT_TO_MODEL_LOADER:
        return _LOAD_FORMAT_TO_MODEL_LOADER[name](load_config)
    if name in ("auto", "hf", "safetensors"):
        return DefaultModelLoader(load_config)
    raise ValueError(f"load_format {name!r} has no loader: register one by register_model_loader")


class _Filler:
    """Lets a loader fill what the engine has built."""

    def __init__(self, loader: type[BaseModelLoader]) -> None:
        self._loader = loader

    def __call__(self, model: Any, config: VllmConfig) -> None:
        """ValueError: the loader returns another model, or the checkpoint is quantised."""
        own = config.model_config
        options = own.model_loader_extra_config or {}
        load_config = LoadConfig(load_format=own.load_format, model_loader_extra_config=dict(options))
        hf = transformers_config(own.hf_config.raw, Path(own.path), own.trust_remote_code)
        view = VllmConfigView(view_of(config, hf), load_config=load_config, device_config=View(config.device_config))
        loader = self._loader(load_config)
        given = model.inner if isinstance(model, OutsideModel) else model
        with _filling(given, model, Path(own.path)):
            filled = loader.load_model(vllm_config=view, model_config=view.model_config)
        if filled is not given:
            raise ValueError(
                f"load_format={own.load_format!r}: {self._loader.__name__}.load_model must return the model that "
                "BaseModelLoader.load_model gives"
            )
        if isinstance(model, OutsideModel):
            model.finish_loading()


@contextmanager
def _filling(given: Any, model: Any, folder: Path) -> Iterator[None]:
    """Let loaders find the model; one of the engine's own takes a whole checkpoint by `load_weights` within."""
    is_own = given is model
    if is_own:
        given.load_weights = lambda weights: load_weights(model, folder, tensors=weights)
    token = _built.set((given, model))
    try:
        yield
    finally:
        _built.reset(token)
        if is_own:
            del given.load_weights
