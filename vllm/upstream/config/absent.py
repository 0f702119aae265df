"""Configurations of what there is nothing of here: they can be imported, and none can be made."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved

_NOTHING = "there is nothing here that it would configure; leave it out"


class MambaConfig(Unserved):
    """Recurrent layers."""

    instead: ClassVar[str] = "models with recurrent layers are not served"


class SpeechToTextConfig(Unserved):
    """How speech is cut."""

    instead: ClassVar[str] = "speech is not transcribed; only text models are served"


class SpeechToTextParams(Unserved):
    """How speech is transcribed."""

    instead: ClassVar[str] = "speech is not transcribed; only text models are served"


class DiffusionConfig(Unserved):
    """Models that denoise text."""

    instead: ClassVar[str] = "models that denoise text are not served"


class EngramConfig(Unserved):
    """Models with tables of n-grams."""

    instead: ClassVar[str] = "models with tables of n-grams are not served"


class WatermarkConfig(Unserved):
    """Marks in texts."""

    instead: ClassVar[str] = "texts are not watermarked; leave it out"


class WatchdogConfig(Unserved):
    """Who notices a hang."""

    instead: ClassVar[str] = "VLLM_WORKER_TIMEOUT_S and VLLM_ENGINE_HANG_TIMEOUT_S bound how long a hang lasts"


class LoggingConfig(Unserved):
    """What is logged."""

    instead: ClassVar[str] = "VLLM_LOGGING_LEVEL and VLLM_LOGGING_CONFIG_PATH set up the log"


class FaultToleranceConfig(Unserved):
    """Replicas that outlive another."""

    instead: ClassVar[str] = _NOTHING


class HiSparseConfig(Unserved):
    """Sparse attention."""

    instead: ClassVar[str] = _NOTHING


class AuxOutputConfig(Unserved):
    """Further outputs of a model."""

    instead: ClassVar[str] = _NOTHING


class EncoderCacheManagerConfig(Unserved):
    """A cache of encoded media."""

    instead: ClassVar[str] = _NOTHING
