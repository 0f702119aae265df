"""A command-line parser that takes flags as upstream's does; for callers that build their own from it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from vllm.logger import init_logger
from vllm.utils.flag_types import human_readable_int, human_readable_int_or_auto

__all__ = ["FlexibleArgumentParser", "human_readable_int", "human_readable_int_or_auto"]

logger = init_logger(__name__)

_LEVEL = re.compile(r"-O=?(\d+)?")


class SortedHelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Flags in the order of the alphabet, with their defaults."""

    def add_arguments(self, actions: Any) -> None:
        """See argparse."""
        super().add_arguments(sorted(actions, key=lambda action: tuple(action.option_strings)))


class EnableDisableAction(argparse.BooleanOptionalAction):
    """A pair of flags: --enable-x and --disable-x where the first is one of these, else --x and --no-x."""

    def __init__(self, option_strings: Sequence[str], dest: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(list(option_strings), dest, *args, **kwargs)
        inverses = [_inverse(flag) for flag in option_strings if flag.startswith("--")]
        self.option_strings = [*option_strings, *inverses]
        self._inverses = frozenset(inverses)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """See argparse."""
        setattr(namespace, self.dest, option_string not in self._inverses)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse's parser, and beside it: underscores in flags are hyphens; `--flag.key.sub value` sets one value of a
    flag that takes a JSON object, and `--flag.key+ a,b` appends to a list in it; `-O2` is `--optimization-level 2`;
    `--config FILE` reads flags from a YAML file, which those of the command line override."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", SortedHelpFormatter)
        self._deprecated: set[str] = set()
        super().__init__(*args, **kwargs)
        self.register("action", argparse.BooleanOptionalAction, EnableDisableAction)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Any:
        """argparse's; of a description of several paragraphs the first is shown."""
        if kwargs.get("description"):
            kwargs["description"] = kwargs["description"].strip().partition("\n\n")[0]
        return super().add_argument_group(*args, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """argparse's, of every Python version: with `deprecated=True`, use of the flag is a warning."""
        is_deprecated = kwargs.pop("deprecated", False)
        action = super().add_argument(*args, **kwargs)
        if is_deprecated:
            self._deprecated.update(action.option_strings)
        return action

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """argparse's, of the flags as they are after the rewriting that the class tells of.

        Raises:
            ValueError: the file of --config is no YAML file or no mapping; `serve` without a model.
            FileNotFoundError: it is not there.
        """
        import sys

        arguments = list(sys.argv[1:] if args is None else args)
        if arguments and arguments[0] == "serve":
            arguments = _model_first(arguments)
        arguments = self._with_config(arguments)
        arguments = self._join_json([_hyphens(argument) for argument in _levels(arguments)])
        for flag in self._deprecated.intersection(argument.partition("=")[0] for argument in arguments):
            logger.warning("argument '%s' is deprecated", flag.lstrip("-"))
        return super().parse_args(arguments, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with status 2."""
        super().error(message)

    def check_port(self, value: str) -> int:
        """A port number.

        Raises:
            argparse.ArgumentTypeError: it is none of 1024 to 65535.
        """
        try:
            port = int(value)
        except ValueError:
            raise argparse.ArgumentTypeError("Port must be an integer") from None
        if not 1024 <= port <= 65535:
            raise argparse.ArgumentTypeError("Port must be between 1024 and 65535")
        return port

    def load_config_file(self, file_path: str) -> list[str]:
        """The flags that a YAML file of `name: value` lines stands for.

        Raises:
            ValueError: another kind of file, or no mapping.
            FileNotFoundError: it is not there.
        """
        import yaml

        path = Path(file_path)
        if path.suffix not in (".yaml", ".yml"):
            raise ValueError(f"--config takes a YAML file (.yaml, .yml), got {file_path!r}")
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if not isinstance(content, dict):
            raise ValueError(f"{file_path} must hold `name: value` lines")
        pairs = {
            name
            for action in self._actions
            if isinstance(action, argparse.BooleanOptionalAction)
            for name in action.option_strings
        }
        flags: list[str] = []
        for key, value in content.items():
            flag = f"--{key}"
            if value is False and flag in pairs:
                flags.append(f"--no-{key}")  # the hidden spelling of every pair
            elif isinstance(value, bool):
                flags += [flag] if value else []
            elif isinstance(value, list):
                flags += [flag, *map(str, value)] if value else []
            elif value is not None:
                flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        return flags

    def _with_config(self, arguments: list[str]) -> list[str]:
        """The file's flags in front of those of the command line, after a subcommand and its positionals."""
        places = [index for index, argument in enumerate(arguments) if re.match(r"--config(=|$)", argument)]
        if not places:
            return arguments
        if len(places) > 1:
            raise ValueError("--config is given more than once")
        index = places[0]
        before, (flag, *after) = arguments[:index], arguments[index:]
        if "=" in flag:
            path = flag.partition("=")[2]
        elif after and not after[0].startswith("-"):
            path = after.pop(0)
        else:
            raise ValueError("--config needs the path of a YAML file")
        loaded = self.load_config_file(path)
        if before[:1] == ["serve"]:
            has_model = len(before) > 1 and not before[1].startswith("-")
            if not has_model and "--model" not in loaded:
                raise ValueError("No model specified! Give it as `serve MODEL`, or as `model` in the file of --config")
        first = next((at for at, argument in enumerate(before) if argument.startswith("-")), len(before))
        return [*before[:first], *loaded, *before[first:], *after]

    def _join_json(self, arguments: list[str]) -> list[str]:
        """`--flag.key value` pairs gathered into one `--flag {...}` each."""
        kept: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        seen: dict[str, None] = {}
        rest = iter(arguments)
        for argument in rest:
            key, has_value, value = argument.partition("=")
            if key.startswith("-"):
                name = key.rstrip("+") if key.endswith("+") else key
                if name == key and key in seen and ("." in key or key == "--optimization-level"):
                    logger.warning("found a duplicate of %s: the last one counts", key)
                seen[key] = None
            if not re.match(r"--?[A-Za-z][\w-]*\.", key):
                kept.append(argument)
                continue
            if not has_value:
                value = next(rest, "")
            flag, *path = key.split(".")
            _set(objects.setdefault(flag, {}), path, value)
        joined = [part for flag, value in objects.items() for part in (flag, json.dumps(value))]
        return [*kept, *joined]


def _model_first(arguments: list[str]) -> list[str]:
    """`serve ... --model X` as `serve X ...`."""
    for index, argument in enumerate(arguments):
        if argument == "--model" and index + 1 < len(arguments):
            return ["serve", arguments[index + 1], *arguments[1:index], *arguments[index + 2 :]]
        if argument.startswith("--model="):
            return ["serve", argument.partition("=")[2], *arguments[1:index], *arguments[index + 1 :]]
    return arguments


def _levels(arguments: list[str]) -> list[str]:
    """-O2, -O=2 and -O 2 as --optimization-level."""
    found: list[str] = []
    for argument in arguments:
        match = _LEVEL.fullmatch(argument)
        if match is None:
            found.append(argument)
        else:
            found += ["--optimization-level", match[1]] if match[1] else ["--optimization-level"]
    return found


def _hyphens(argument: str) -> str:
    """The flag with hyphens for underscores; keys after a dot, and values, as they are."""
    if not argument.startswith("--"):
        return argument
    end = re.search(r"[.=]|$", argument)
    assert end is not None
    flag = argument[: end.start()].replace("_", "-")
    if flag.startswith(("--no-enable-", "--no-disable-")):
        flag = _inverse("--" + flag.removeprefix("--no-"))
    return flag + argument[end.start() :]


def _inverse(flag: str) -> str:
    name = flag.removeprefix("--")
    if name.startswith("enable-"):
        return "--disable-" + name.removeprefix("enable-")
    return "--enable-" + name.removeprefix("disable-") if name.startswith("disable-") else f"--no-{name}"


def _set(place: dict[str, Any], path: list[str], text: str) -> None:
    """Set, or append to, what the path leads to."""
    *parents, last = path
    for name in parents:
        place = place.setdefault(name, {})
    if last.endswith("+"):
        place.setdefault(last[:-1], []).extend(_value(part) for part in text.split(","))
    else:
        place[last] = _value(text)


def _value(text: str) -> Any:
    """JSON where it is, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
