"""The prompts of a benchmark: random tokens, or the texts of a file."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.cli.other_flags import add_refused
from vllm.exceptions import CliError
from vllm.utils.flag_types import at_least

Tokenize = Callable[[str], Awaitable[list[int]]]

_CUSTOM = 'take --dataset-name custom, a file of {"prompt": TEXT} lines'
_NOT_READ = {
    **dict.fromkeys(("sonnet", "burstgpt", "hf", "spec_bench", "speed_bench", "timed_trace"), _CUSTOM),
    **dict.fromkeys(("random-mm", "custom_mm", "custom_image", "custom_audio"), "prompts are texts"),
    "random-rerank": "/rerank is not measured",
}
_NAMES = ("random", "sharegpt", "custom", "prefix_repetition")
# Upstream drops ShareGPT's conversations that are shorter or longer.
_LEAST_LEN, _MOST_PROMPT_LEN, _MOST_LEN = 4, 1024, 2048
_CUSTOM_OUTPUT_LEN = 256
_OTHER_FLAGS = {
    **dict.fromkeys(
        (
            "--sonnet-input-len", "--sonnet-output-len", "--sonnet-prefix-len", "--hf-subset", "--hf-split",
            "--hf-name", "--hf-output-len", "--spec-bench-output-len", "--spec-bench-category",
            "--speed-bench-dataset-subset", "--speed-bench-output-len", "--speed-bench-category",
            "--blazedit-min-distance", "--blazedit-max-distance",
        ),
        _CUSTOM,
    ),
    **dict.fromkeys(
        (
            "--random-mm-base-items-per-request", "--random-mm-num-mm-items-range-ratio", "--random-mm-bucket-config",
            "--random-mm-limit-mm-per-prompt", "--enable-multimodal-chat",
        ),
        "prompts are texts",
    ),
    "--no-reranker": "/rerank is not measured",
}  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """A request of the workload: its prompt as token ids or as text, and how many tokens are generated."""

    content: list[int] | str
    output_len: int


def _dataset_name(text: str) -> str:
    if text in _NOT_READ:
        raise argparse.ArgumentTypeError(f"{text} is not supported: {_NOT_READ[text]}")
    if text not in _NAMES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(_NAMES)}, got {text!r}")
    return text


def _range_ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {text}")
    return value


def add_dataset_arguments(parser: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    """Add the flags that say what prompts there are, with the lengths of random ones, in tokens, as defaults."""
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add(
        "--dataset-name", type=_dataset_name, default="random", metavar="NAME",
        help=f"{', '.join(_NAMES)} (default: random tokens)",
    )  # fmt: skip
    add(
        "--dataset-path", "--dataset", metavar="FILE", type=Path,
        help='sharegpt: JSON of conversations; custom: JSONL of {"prompt": TEXT}, with "output_tokens" if they differ',
    )  # fmt: skip
    add("--input-len", "--random-input-len", metavar="N", type=at_least(1), default=input_len, help="tokens a prompt")
    add(
        "--output-len", "--random-output-len", "--sharegpt-output-len", "--custom-output-len", metavar="N", type=int,
        help=f"tokens to generate for each (default: {output_len}; as long as the answers of sharegpt, "
        f"{_CUSTOM_OUTPUT_LEN} of custom; -1: as its file says)",
    )  # fmt: skip
    add(
        "--random-range-ratio", metavar="R", type=_range_ratio, default=0.0,
        help="lengths are drawn from N (1 - R) to N (1 + R)",
    )  # fmt: skip
    add(
        "--random-prefix-len", "--prefix-len", metavar="N", type=at_least(0), default=0,
        help="tokens before each random prompt that are the same in all",
    )  # fmt: skip
    for name, default, text in (
        ("prefix-len", 256, "tokens that prompts share"),
        ("suffix-len", 256, "tokens of their own"),
        ("num-prefixes", 10, "different prefixes"),
        ("output-len", 128, "tokens to generate for each"),
    ):
        flag, about = f"--prefix-repetition-{name}", f"of prefix_repetition: {text}"
        add(flag, metavar="N", type=at_least(1), default=default, help=about)
    add("--disable-shuffle", action="store_true", help="keep the file's order, instead of one drawn from --seed")
    add("--no-oversample", action="store_true", help="do not repeat a file that has fewer prompts than --num-prompts")
    parser.set_defaults(default_output_len=output_len)
    add_refused(parser, _OTHER_FLAGS)


def check_dataset(args: argparse.Namespace) -> None:
    """A CliError: flags that exclude each other, or a file that cannot be read."""
    reads_file = args.dataset_name in ("sharegpt", "custom")
    if reads_file and args.dataset_path is None:
        raise CliError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    if args.dataset_path is not None:
        if not reads_file:
            raise CliError(f"--dataset-path is for sharegpt and custom, and has no effect on {args.dataset_name}")
        if not args.dataset_path.is_file():
            raise CliError(f"--dataset-path: there is no file {args.dataset_path}")
    least = -1 if args.dataset_name == "custom" else 1
    if args.output_len is not None and (args.output_len < least or args.output_len == 0):
        raise CliError(f"--output-len must be at least 1, got {args.output_len}")
    if args.output_len is None and not reads_file:
        args.output_len = args.default_output_len


async def make_prompts(
    args: argparse.Namespace, draw: random.Random, count: int, vocab_size: int, tokenize: Tokenize
) -> list[Prompt]:
    """So many prompts, or fewer if a file has fewer and --no-oversample; a CliError if it has none."""
    if args.dataset_name == "random":
        return _random_prompts(args, draw, count, vocab_size)
    if args.dataset_name == "prefix_repetition":
        return _repeated_prefixes(args, draw, count, vocab_size)
    texts = _conversations(args.dataset_path) if args.dataset_name == "sharegpt" else _lines(args.dataset_path)
    if not args.disable_shuffle:
        draw.shuffle(texts)
    found: list[Prompt] = []
    for text, answer in texts:
        if len(found) == count:
            break
        if args.dataset_name == "sharegpt":
            prompt = await _of_conversation(args, text, answer, tokenize)
        else:
            prompt = _of_line(args, text, answer)
        if prompt is not None:
            found.append(prompt)
    if not found:
        raise CliError(f"--dataset-path: {args.dataset_path} has no usable prompt")
    if not args.no_oversample:
        found += draw.choices(found, k=count - len(found))
    return found


def _random_prompts(args: argparse.Namespace, draw: random.Random, count: int, vocab_size: int) -> list[Prompt]:
    prefix = draw.choices(range(vocab_size), k=args.random_prefix_len)

    def length(middle: int) -> int:
        spread = int(middle * args.random_range_ratio)
        return draw.randint(max(middle - spread, 1), middle + spread) if spread else middle

    return [
        Prompt(prefix + draw.choices(range(vocab_size), k=length(args.input_len)), length(args.output_len))
        for _ in range(count)
    ]


def _repeated_prefixes(args: argparse.Namespace, draw: random.Random, count: int, vocab_size: int) -> list[Prompt]:
    ids = range(vocab_size)
    prefixes = [
        draw.choices(ids, k=args.prefix_repetition_prefix_len) for _ in range(args.prefix_repetition_num_prefixes)
    ]
    found = [
        Prompt(
            prefixes[number % len(prefixes)] + draw.choices(ids, k=args.prefix_repetition_suffix_len),
            args.prefix_repetition_output_len,
        )
        for number in range(count)
    ]
    draw.shuffle(found)
    return found


def _conversations(path: Path) -> list[tuple[str, Any]]:
    """The first two turns of each."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        turns = [each.get("conversations") or each.get("conversation") or [] for each in entries]
        return [(str(each[0]["value"]), str(each[1]["value"])) for each in turns if len(each) > 1]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CliError(f"--dataset-path: {path} is no ShareGPT file: {error!r}") from None


def _lines(path: Path) -> list[tuple[str, Any]]:
    found = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                entry = json.loads(line)
                if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
                    raise CliError(f'--dataset-path: {path}:{number} must be an object with a text "prompt"')
                found.append((entry["prompt"], entry.get("output_tokens")))
    except (OSError, ValueError) as error:
        raise CliError(f"--dataset-path: {path} is no JSONL file: {error}") from None
    return found


async def _of_conversation(args: argparse.Namespace, text: str, answer: str, tokenize: Tokenize) -> Prompt | None:
    """None: shorter or longer than the benchmark has them."""
    input_len = len(await tokenize(text))
    output_len = args.output_len or len(await tokenize(answer))
    is_short = input_len < _LEAST_LEN or (args.output_len is None and output_len < _LEAST_LEN)
    is_long = input_len > _MOST_PROMPT_LEN or input_len + output_len > _MOST_LEN
    return None if is_short or is_long else Prompt(text, output_len)


def _of_line(args: argparse.Namespace, text: str, said: Any) -> Prompt:
    output_len = args.output_len or _CUSTOM_OUTPUT_LEN
    if output_len == -1:
        if not isinstance(said, int) or said < 1:
            raise CliError(f'--output-len -1: a line of {args.dataset_path} has no "output_tokens"')
        output_len = said
    return Prompt(text, output_len)
