"""Loads an engine's custom processor classes."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.sample.logits_processor.request import processor_name
from vllm.v1.sample.logits_processor.slots import SlotLogitsProcessor

ProcessorClass = type[LogitsProcessor] | type[SlotLogitsProcessor]

LOGITSPROCS_GROUP = "vllm.logits_processors"
"""Entry-point group under which installed packages name processors; every engine uses them."""


def load_logits_processors(specs: Sequence[str | type] | None = None) -> list[ProcessorClass]:
    """The classes of installed packages, then those of `specs` (subclasses of LogitsProcessor, or
    "module.path:ClassName"), each once. ValueError: one cannot be loaded; the message names it and the reason."""
    if isinstance(specs, (str, type)) or not isinstance(specs or (), Iterable):
        raise ValueError(f"logits_processors must be a list of classes or of 'module.path:ClassName', got {specs!r}")
    entries = importlib.metadata.entry_points(group=LOGITSPROCS_GROUP)
    installed = sorted(entries, key=lambda entry: (entry.name, entry.value))
    classes = [_load_entry_point(entry) for entry in installed]
    classes += load_named_processors(specs)
    return list(dict.fromkeys(classes))


def load_named_processors(specs: Iterable[str | type] | None) -> list[ProcessorClass]:
    """The classes of `specs`, as load_logits_processors takes them."""
    return [_load_spec(spec) for spec in specs or ()]


def validate_params(classes: Iterable[ProcessorClass], params: SamplingParams) -> None:
    """Raises VLLMValidationError when one of the classes cannot honour a request's parameters."""
    for cls in classes:
        try:
            cls.validate_params(params)
        except VLLMValidationError:
            raise
        except ValueError as error:
            raise VLLMValidationError(str(error)) from error
        except Exception as error:
            subject = f"logits processor {processor_name(cls)}"
            raise VLLMValidationError(
                f"{subject} could not check the parameters: {type(error).__name__}: {error}"
            ) from error


def _load_spec(spec: Any) -> ProcessorClass:
    subject = f"logits processor {spec!r}"
    if not isinstance(spec, str):
        return _checked(subject, spec)
    module, _, attribute = spec.partition(":")
    if not attribute or ":" in attribute:
        raise ValueError(f"Invalid logits processor FQCN {spec!r}: must have the form 'module.path:ClassName'")
    return _resolve(subject, module, attribute)


def _load_entry_point(entry: EntryPoint) -> ProcessorClass:
    subject = f"logits processor of entry point {entry.name!r} = {entry.value!r} (group {LOGITSPROCS_GROUP})"
    # Not entry.module: what it raises for another form differs from Python to Python.
    form = entry.pattern.match(entry.value)
    module, attribute = form.group("module", "attr") if form else (None, None)
    return _resolve(subject, module, attribute)


def _resolve(subject: str, module_name: str | None, attribute: str | None) -> ProcessorClass:
    if not (module_name and attribute):
        raise ValueError(f"{subject}: must have the form 'module.path:ClassName'")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(f"{subject}: there is no module {missing!r}") from error
        raise ValueError(f"{subject}: importing {module_name!r} raised {type(error).__name__}: {error}") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ValueError(f"{subject}: {processor_name(found)!r} has no attribute {name!r}")
        found = getattr(found, name)
    return _checked(subject, found)


def _checked(subject: str, found: Any) -> ProcessorClass:
    if not isinstance(found, type):
        raise ValueError(f"{subject}: is not a class but of type {type(found).__name__}")
    if not issubclass(found, (LogitsProcessor, SlotLogitsProcessor)):
        raise ValueError(
            f"{subject}: is not a subclass of vllm.v1.sample.logits_processor.LogitsProcessor, or of "
            "vllm.v1.worker.gpu.sample.logits_processor.LogitsProcessor"
        )
    return found
