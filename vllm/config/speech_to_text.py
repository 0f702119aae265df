"""Speech, at upstream's path."""

from vllm.config.absent import SpeechToTextConfig, SpeechToTextParams

__all__ = ["SpeechToTextConfig", "SpeechToTextParams"]
