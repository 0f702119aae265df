"""Pictures from outside: where they may come from, how they are fetched, and what they are decoded to."""

from vllm.inputs.media.access import MediaAccess
from vllm.inputs.media.films import FilmFrames
from vllm.inputs.media.loader import LoadedPictures, PictureLoader, with_pictures
from vllm.inputs.media.sources import PictureSource

__all__ = ["FilmFrames", "LoadedPictures", "MediaAccess", "PictureLoader", "PictureSource", "with_pictures"]
