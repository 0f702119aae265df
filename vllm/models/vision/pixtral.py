"""Pixtral's and Mistral 3's processor, whose place in transformers needs torchvision."""

from __future__ import annotations

from typing import Any

from transformers import ProcessorMixin


class PixtralProcessor(ProcessorMixin):
    """A picture is rows of tokens, one a patch, with a token after each row and another after the last."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **others: Any,
    ) -> None:
        """The options of processor_config.json."""
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self._row_end, self._end = image_token, image_break_token, image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        self._edge = patch_size * spatial_merge_size

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(images, **{**options, "patch_size": self._edge})

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **others: Any) -> str:
        """The text that stands for a picture in a prompt."""
        height, width = (int(each) // self._edge for each in image_inputs["image_sizes"][image_idx])
        rows = [self.image_token * width] * height
        return self._row_end.join(rows) + self._end
