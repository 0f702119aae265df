"""Where the parts of a text are whose embeddings late chunking gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.pooling_outputs import LateChunk, LateChunks
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.input_processor import ProcessedPrompt

_FIELD = "late_chunking_params"


def late_chunks(
    tokenizer: Tokenizer | None, prompt: ProcessedPrompt, params: Any, add_special_tokens: bool = True
) -> LateChunks | None:
    """The parts that the PoolingParams ask for; None: they ask for none.

    Raises:
        VLLMValidationError: the prompt is no text, or was cut; its tokens' places in the text are not known.
    """
    if params.late_chunking_params is None:
        return None
    if params.truncate_prompt_tokens is not None:
        message = "late chunking does not support truncate_prompt_tokens: its ranges are of the whole text"
        raise VLLMValidationError(message, "truncate_prompt_tokens", params.truncate_prompt_tokens)
    if not prompt.text or tokenizer is None:
        message = "late chunking needs plain-text input: it says which characters a part has"
        raise VLLMValidationError(message, _FIELD)
    ids, offsets = tokenizer.encode_with_offsets(prompt.text, add_special_tokens)
    if ids != prompt.token_ids:
        raise VLLMValidationError(
            "late chunking needs plain-text input, and these token ids are not its text's", _FIELD
        )
    size = params.late_chunking_params.chunk_size
    return build_late_chunking_metadata(prompt.text, len(ids), offsets, size)


def build_late_chunking_metadata(
    text: str, num_tokens: int, offsets: Sequence[tuple[int, int]] | None, chunk_size: int
) -> LateChunks:
    """The parts of `chunk_size` tokens of a text.

    Args:
        offsets: the characters of each token, begin and end; those that no character makes have none. None: the
            tokenizer does not tell.

    Raises:
        VLLMValidationError: they are not those of the text's tokens.
    """
    if offsets is None or len(offsets) != num_tokens:
        message = "late chunking needs the tokens' offsets in the text, which this tokenizer does not tell"
        raise VLLMValidationError(message, _FIELD)
    real = [(begin, end) for begin, end in offsets if begin != end]
    if any(begin > end for begin, end in real) or any(not 0 <= place <= len(text) for pair in real for place in pair):
        raise VLLMValidationError("late chunking: the tokens' offsets are outside the text", _FIELD)
    if real != sorted(real, key=lambda pair: pair[0]):
        raise VLLMValidationError("late chunking: the tokens' offsets are not in the text's order", _FIELD)
    chunks = []
    for start in range(0, num_tokens, chunk_size):
        stop = min(start + chunk_size, num_tokens)
        own = [(begin, end) for begin, end in offsets[start:stop] if begin != end]
        place = (own[0][0], max(end for _, end in own)) if own else None
        chunks.append(LateChunk((start, stop), place))
    return LateChunks(chunk_size, num_tokens, chunks)
