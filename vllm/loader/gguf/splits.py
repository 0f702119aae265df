"""How byte-level BPE vocabularies split a text into words, by the name in `tokenizer.ggml.pre`.

The expressions are those of the published tokenizers; which name means which is as in llama.cpp (llama-vocab.cpp).
"""

from __future__ import annotations

from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
# Runs of white space are cut into powers of two.
_RUNS = "|".join(rf"\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + rf"|{_RUNS}|\s{{1,2}}(?!\S)|\s"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
# Marks belong to words.
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters with cases, but for those of mathematics.
_DEEPSEEK_LETTERS = "\\s?(?:(?![\U0001d400-\U0001d7ff])[\\p{Lu}\\p{Ll}\\p{Lt}])+"
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI_UPPER, _KIMI_LOWER = (rf"(?:(?!\p{{Han}}){letters})" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"
)

# Steps: an expression whose matches stand alone, or one of these.
_GPT2, _DIGITS, _NUMBERS, _PUNCTUATION = "<gpt2>", "<digits>", "<numbers>", "<punctuation>"
# Falcon's tokenizer looks for numbers among the bytes; where a file names none, llama.cpp does so in the text.
_GPT2_TEXT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2_TEXT, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (_PUNCTUATION, _GPT2, _NUMBERS, "[0-9][0-9][0-9]")

_NAMES: dict[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2 phi-2 mpt olmo jais trillion jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code "
    "roberta-bpe gigachat exaone4 a.x-4.0 mellum modern-bert",
    (_DIGITS, _GPT2): "starcoder refact command-r smollm codeshell exaone minerva-7b",
    (_LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe",
    (_JAIS2,): "jais-2",
    (_QWEN2,): "qwen2 stablelm2 deepseek-r1-qwen megrez kormo hunyuan grok-2 solar-open",
    (_QWEN35,): "qwen35",
    (_TEKKEN,): "tekken",
    (_GPT4O,): "gpt-4o llama4 kanana2 minimax-m2",
    (_BLOOM,): "bloom poro-chat gpt3-finnish",
    (_BLOOM, _DIGITS): "viking",
    (r"\p{N}{1,3}", _CJK, _DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm",
    (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_MARKS, r"\s+$", _DEEPSEEK_CJK, _DIGITS): "deepseek-llm",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGITS): "deepseek-coder",
    (_SEED_CODER,): "seed-coder",
    (_KIMI,): "kimi-k2",
    _FALCON: "falcon",
    _DEFAULT: "default",
}
_STEPS = {name: steps for steps, names in _NAMES.items() for name in names.split()}

# A word that is in the vocabulary is one token, whatever the merges; and a prompt begins with BOS unless told.
WHOLE_WORDS = frozenset("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split())


def pre_tokenizer(name: str) -> Any:
    """The `tokenizers` pre-tokenizer of a name; ValueError if it is not known."""
    from tokenizers import Regex, pre_tokenizers

    if name not in _STEPS:
        raise ValueError(f"tokenizer.ggml.pre must be one of {', '.join(sorted(_STEPS))}, got {name!r}")
    made: dict[str, Any] = {
        _GPT2: lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
        _DIGITS: lambda: pre_tokenizers.Digits(individual_digits=True),
        _NUMBERS: lambda: pre_tokenizers.Digits(individual_digits=False),
        _PUNCTUATION: lambda: pre_tokenizers.Punctuation("contiguous"),
    }
    steps = [made[step]() if step in made else pre_tokenizers.Split(Regex(step), "isolated") for step in _STEPS[name]]
    if _GPT2 not in _STEPS[name]:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
