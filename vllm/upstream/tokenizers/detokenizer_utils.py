"""Token ids to texts, a token at a time; over transformers' tokenizers, as upstream's callers hold them."""

from __future__ import annotations

from typing import Any

from vllm.tokenizers.text_streams import REPLACEMENT, continue_text

_CONTEXT_TOKENS = 6


def convert_ids_list_to_tokens(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """The text of each id by itself, with its leading space."""
    return [tokenizer.decode([token_id]) for token_id in token_ids]


def convert_prompt_ids_to_tokens(
    tokenizer: Any, prompt_ids: list[int], skip_special_tokens: bool = False
) -> tuple[list[str], int, int]:
    """The state from which `detokenize_incrementally` goes on after a prompt.

    Returns:
        The spellings of the prompt's last tokens; where the text that gives them context begins; and where it ends.
    """
    tokens = tokenizer.convert_ids_to_tokens(prompt_ids[-_CONTEXT_TOKENS:], skip_special_tokens=skip_special_tokens)
    read = len(tokens)
    return [token or "" for token in tokens], max(read - _CONTEXT_TOKENS + 1, 0), read


def detokenize_incrementally(
    tokenizer: Any,
    all_input_ids: list[int],
    prev_tokens: list[str] | None,
    prefix_offset: int,
    read_offset: int,
    skip_special_tokens: bool = False,
    spaces_between_special_tokens: bool = True,
) -> tuple[list[str], str, int, int]:
    """The text that the last id adds.

    Args:
        all_input_ids: all ids, the new one last.
        prev_tokens: spellings of those before it, as the last call gave them; None the first time.
        prefix_offset, read_offset: where the context begins and where it ends, in tokens, as the last call gave them.
        skip_special_tokens: special tokens have no text.
        spaces_between_special_tokens: kept for callers; spaces are as the tokenizer puts them.

    Returns:
        The spellings of the new tokens, all of them the first time; the text, empty while a character is unfinished,
        with the whole of one that the prompt began; and the two offsets for the next call.
    """
    new_tokens: list[str] = []
    is_first = prev_tokens is None
    if prev_tokens is None:
        prev_tokens, prefix_offset, read_offset = convert_prompt_ids_to_tokens(
            tokenizer, all_input_ids[:-1], skip_special_tokens=skip_special_tokens
        )
    special = set(tokenizer.all_special_ids) if skip_special_tokens else set()
    if 0 <= all_input_ids[-1] < len(tokenizer) and all_input_ids[-1] not in special:
        new_tokens = [tokenizer.convert_ids_to_tokens([all_input_ids[-1]])[0] or ""]
    tokens = [*prev_tokens, *new_tokens]
    shown = tokens if is_first else new_tokens
    before = tokenizer.convert_tokens_to_string(tokens[prefix_offset:read_offset])
    text = tokenizer.convert_tokens_to_string(tokens[prefix_offset:])
    is_open = before.endswith(REPLACEMENT)
    if text.endswith(REPLACEMENT) or (len(text) <= len(before) and not is_open):
        return shown, "", prefix_offset, read_offset
    added = continue_text(before, text)[1] if is_open else text[len(before) :]
    return shown, added, read_offset, len(tokens)
