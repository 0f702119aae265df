"""Media: pictures are encoded and loaded; what upstream makes of them for its models has no place here."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm.exceptions import VLLMValidationError
from vllm.inputs.media.access import MediaAccess
from vllm.inputs.media.films import FilmFrames
from vllm.inputs.media.loader import PictureLoader
from vllm.inputs.media.sources import PictureSource

_INSTEAD_REGISTRY = (
    "pictures and frames of videos are given to the engine as they are, by multi_modal_data (docs/images.md)"
)


def refuse_media(what: str) -> NoReturn:
    """
    Args:
        what: was asked for.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"{what}: {_INSTEAD_REGISTRY}")


class MultiModalRegistry:
    """Upstream's registry of processors, without any: transformers' are used."""

    def supports_multimodal_inputs(self, model_config: Any) -> bool:
        """Whether the model reads pictures."""
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


class MediaConnector:
    """Pictures of URLs, for prompts. Of sound there are none, and a video is its frames here.

    Args:
        media_io_kwargs: of videos alone, see `FilmFrames.of`.
        connection: None, as the pictures' own checks stand before each fetch.
        allowed_local_media_path: the folder below which files are read; empty: none is.
        allowed_media_domains: hosts from which pictures are fetched; None: none.

    Raises:
        ValueError: an argument asks for something else.
    """

    def __init__(
        self,
        media_io_kwargs: Any = None,
        connection: Any = None,
        *,
        allowed_local_media_path: str = "",
        allowed_media_domains: list[str] | None = None,
    ) -> None:
        if connection is not None:
            raise ValueError(f"connection: pictures are fetched by connections of their own; leave out {connection!r}")
        FilmFrames.of(media_io_kwargs)
        self._loader = PictureLoader(MediaAccess.of(allowed_media_domains, allowed_local_media_path))

    def fetch_image(self, image_url: str, *, image_mode: str | None = "RGB") -> Any:
        """The PIL image of a URL.

        Raises:
            VLLMValidationError: it cannot be read, or its place is not among those that are allowed.
        """
        if not isinstance(image_url, str):
            message = f"image_url must be a picture's URL, got {type(image_url).__name__}"
            raise VLLMValidationError(message, "image_url")
        (image,) = self._loader.load_now([PictureSource("image_url", url=image_url)]).images
        return image if image_mode is None else convert_image_mode(image, image_mode)

    async def fetch_image_async(self, image_url: str, *, image_mode: str | None = "RGB") -> Any:
        """As `fetch_image`."""
        return await asyncio.to_thread(self.fetch_image, image_url, image_mode=image_mode)


def fetch_image(image_url: str, image_io_kwargs: Any = None) -> Any:
    """The PIL image of a data URL; others need a `MediaConnector`, which says what is allowed.

    Raises:
        VLLMValidationError: it is another URL, or has no picture.
        ValueError: image_io_kwargs asks for something.
    """
    if image_io_kwargs:
        raise ValueError(f"image_io_kwargs: pictures are read as they are; leave out {image_io_kwargs!r}")
    return MediaConnector().fetch_image(image_url)


def encode_image_base64(image: Any, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """A PIL image as a base64 text of its file."""
    buffer = io.BytesIO()
    (image if image_mode is None else image.convert(image_mode)).save(buffer, format)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def encode_image_url(image: Any, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """As `encode_image_base64`, as a data URL."""
    encoded = encode_image_base64(image, image_mode=image_mode, format=format)
    return f"data:image/{format.lower()};base64,{encoded}"
