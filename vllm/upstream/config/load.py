"""Upstream's settings of loading weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.config.load import LOAD_FORMATS, OTHER_FORMATS, SAME_AS_AUTO
from vllm.config.unserved import UnservedConfig, choice, number


@dataclass
class LoadConfig(UnservedConfig):
    """Upstream's settings of loading weights."""

    instead: ClassVar[str] = (
        "weights are read from safetensors or GGUF files of a folder, each tensor once, straight to where it belongs; "
        "the engine's load_format is auto or dummy"
    )
    # auto, safetensors and dummy are what load_format does; the others say how files are read, not what from.
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "download_dir", "safetensors_load_strategy", "safetensors_prefetch_num_threads",
            "safetensors_prefetch_block_size", "ignore_patterns", "use_tqdm_on_load", "pt_load_map_location",
        }
    )  # fmt: skip

    load_format: str = "auto"
    download_dir: str | None = None
    safetensors_load_strategy: str | None = choice(None, "lazy", "eager", "prefetch", "torchao")
    safetensors_prefetch_num_threads: int = number(8, 1)
    safetensors_prefetch_block_size: int = number(16 * 2**20, 1)
    model_loader_extra_config: Any = field(default_factory=dict)
    device: str | None = None
    ignore_patterns: list[str] | str = field(default_factory=lambda: ["original/**/*"])
    use_tqdm_on_load: bool = True
    pt_load_map_location: str | dict[str, str] = "cpu"

    def asked(self) -> dict[str, Any]:
        """See UnservedConfig.asked; the load formats that the engine has ask for nothing else."""
        found = super().asked()
        if self.load_format in (*LOAD_FORMATS, *SAME_AS_AUTO, *OTHER_FORMATS):
            found.pop("load_format", None)
        if self.load_format in OTHER_FORMATS:
            found.pop("model_loader_extra_config", None)
        return found
