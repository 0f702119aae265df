"""Media: encoding works, for clients; what processes them is inside of the engine."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

_INSTEAD_REGISTRY = "the engine processes media itself: give them in multi_modal_data, or as parts of messages"


def refuse_media(what: str) -> NoReturn:
    """
    Args:
        what: was asked for.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"{what}: {_INSTEAD_REGISTRY}")


class MultiModalRegistry:
    """Upstream's registry of processors, without any."""

    def supports_multimodal_inputs(self, model_config: Any) -> bool:
        """Whether the engine's model reads pictures."""
        return bool(getattr(model_config, "reads_images", False))

    def register_processor(self, processor: Any, *, info: Any = None, dummy_inputs: Any = None) -> Callable[..., Any]:
        """
        Raises:
            NotImplementedError: always.
        """
        refuse_media("MULTIMODAL_REGISTRY.register_processor")

    def create_processor(self, model_config: Any, *, tokenizer: Any = None, cache: Any = None) -> Any:
        """
        Raises:
            NotImplementedError: always.
        """
        refuse_media("MULTIMODAL_REGISTRY.create_processor")


MULTIMODAL_REGISTRY = MultiModalRegistry()


ModalityData = Any


NestedTensors = Any


BatchedTensorInputs = dict[str, Any]


@dataclass(frozen=True)
class PlaceholderRange:
    """The prompt tokens, `length` from `offset` on, in whose place an item's embeddings stand."""

    offset: int
    length: int
    is_embed: Any = None

    def get_num_embeds(self) -> int:
        """Number of positions that embeddings replace."""
        return self.length if self.is_embed is None else int(self.is_embed.sum().item())


class MultiModalKwargs(dict[str, Any]):
    """A processor's results for media; no processor makes them here."""


class MultiModalKwargsItem(dict[str, Any]):
    """The results for one item."""


def convert_image_mode(image: Any, to_mode: str) -> Any:
    """A PIL image in another mode; from RGBA to RGB, on white."""
    if image.mode == "RGBA" and to_mode == "RGB":
        from PIL import Image

        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.split()[3])
        return white
    return image.convert(to_mode)


def encode_image_base64(image: Any, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """A PIL image as a base64 text of its file."""
    buffer = io.BytesIO()
    (image if image_mode is None else image.convert(image_mode)).save(buffer, format)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def encode_image_url(image: Any, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """As `encode_image_base64`, as a data URL."""
    encoded = encode_image_base64(image, image_mode=image_mode, format=format)
    return f"data:image/{format.lower()};base64,{encoded}"
