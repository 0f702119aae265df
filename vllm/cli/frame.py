"""All subcommands share the look of --help, errors of usage in one line, --config and --debug."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

EXIT_USAGE = 2
_NONE: Mapping[str, str] = {}
COMPLETING = "_ARGCOMPLETE"
"""Set in the environment by the scripts of `vllm completion`."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Descriptions as written; help wrapped with its line breaks kept, and the default named if there is one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [part for line in text.splitlines() for part in textwrap.wrap(line, width)]

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        silent = default is None or isinstance(default, (bool, list)) or default == argparse.SUPPRESS
        if not text or silent or not action.option_strings or "default" in text:
            return text
        return f"{text} (default: %(default)s)"


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line (the usage, with the engine's flags, would fill a screen), and which reads
    further flags from the file that --config names. Underscores in flags are hyphens. `given`: the arguments without
    the file's, while they are parsed. `refused`: commands that are an error by name, and what to do instead."""

    reads_config = False
    refused: Mapping[str, str] = _NONE
    given: Sequence[str] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        # Without abbreviations: one that works today may be ambiguous, or another flag, once a flag is added.
        super().__init__(*args, **{"formatter_class": HelpFormatter, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value in self.refused:
            self.exit(EXIT_USAGE, f"{self.prog} {value}: error: this command is not supported: {self.refused[value]}\n")
        super()._check_value(action, value)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        # The flags of --config stand in front of `args`, which therefore win.
        if self.reads_config and args is not None and COMPLETING not in os.environ:
            self._show_help_part(args)
            args = self._joined_objects([self._own_spelling(argument) for argument in args])
            self.given = args
            from vllm.cli.config_file import with_config
            from vllm.exceptions import CliError

            try:
                args = with_config(self, list(args))
            except CliError as error:
                self.error(str(error))
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self.reads_config:
            # The parser of all commands does not have the flags that could have been meant.
            flags = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def _show_help_part(self, args: Sequence[str]) -> None:
        asked = next((each.partition("=")[2] for each in args if each.startswith("--help=")), None)
        if asked is None:
            return

        try:
            self._print_message(help_part(self, asked), sys.stdout)
        except ValueError as error:
            self.error(str(error))
        self.exit()

    def _own_spelling(self, argument: str) -> str:
        """A flag with hyphens for underscores, and --disable-x for the --no-enable-x that there is."""
        if not argument.startswith("--"):
            return argument
        flag, has_value, value = argument.partition("=")
        outer, dot, inner = flag.partition(".")
        flag = outer.replace("_", "-") + dot + inner
        if flag not in self._option_string_actions:
            for prefix, inverse in (("--disable-", "--no-enable-"), ("--enable-", "--no-disable-")):
                other = inverse + flag.removeprefix(prefix)
                if flag.startswith(prefix) and other in self._option_string_actions:
                    flag = other
        return flag + has_value + value

    def _joined_objects(self, args: Sequence[str]) -> list[str]:
        """`--flag.name VALUE` and `--flag.outer.inner VALUE` as the JSON object that `--flag` takes; VALUE is JSON, or
        else a text."""
        from vllm.utils.flag_types import json_or_text

        plain: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        rest = iter(args)
        for argument in rest:
            path, has_value, value = argument.partition("=")
            flag, *names = path.split(".")
            if not (names and flag.startswith("--") and flag in self._option_string_actions):
                plain.append(argument)
                continue
            place = objects.setdefault(flag, {})
            for name in names[:-1]:
                place = place.setdefault(name, {})
            place[names[-1]] = json_or_text(value if has_value else next(rest, ""))
        for flag, given in objects.items():
            if flag in plain:
                self.error(f"{flag} is given as a whole and by {flag}.{next(iter(given))}: give one of them")
            plain += [flag, json.dumps(given)]
        return plain


def add_commands(parser: CommandParser, modules: Iterable[ModuleType], refused: Mapping[str, str] = _NONE) -> None:
    """Add one subparser a module, which has NAME, HELP and a docstring (the description), and either COMMANDS (modules
    of the same kind, and perhaps REFUSED) or `add_arguments(parser)` and `run(args)`, which returns the exit code.
    `refused`: names of others, and what to do instead."""
    parser.refused = refused
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    for module in modules:
        child = subparsers.add_parser(module.NAME, help=module.HELP, description=module.__doc__)
        if hasattr(module, "COMMANDS"):
            add_commands(child, module.COMMANDS, getattr(module, "REFUSED", _NONE))
        else:
            be_command(child, module)


def be_command(parser: CommandParser, module: ModuleType) -> None:
    """Make `parser` that of a command; see `add_commands`."""
    module.add_arguments(parser)
    common = parser.add_argument_group("all commands")
    config = "YAML file of further flags, as `name: value`; those given here win"
    common.add_argument("--config", metavar="FILE", help=config)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    positionals = [action for action in parser._actions if not action.option_strings]
    names = [f"[{each.metavar}]" if each.nargs == "?" else str(each.metavar) for each in positionals]
    parser.usage = " ".join(["%(prog)s [options]", *names])
    parser.reads_config = True
    parser.set_defaults(run=module.run, prog=parser.prog)


_WHOLE = ("all", "page")
_GROUPS = "listgroup"
# Upstream's name of the server's flags.
_OTHER_TITLES = {"frontend": "server"}


def help_part(parser: argparse.ArgumentParser, asked: str) -> str:
    """The part of the help that `--help=asked` shows.

    Raises:
        ValueError: no group and no flag is called so; the message names the groups.
    """
    groups = {str(group.title).lower(): group for group in parser._action_groups if group._group_actions}
    if asked in _WHOLE:
        return parser.format_help()
    if asked == _GROUPS:
        return "\n".join(groups) + "\n"
    name = _OTHER_TITLES.get(asked.lower(), asked.lower())
    if name in groups:
        return _section(parser, name, groups[name]._group_actions)
    if found := _of_config(parser, asked) or _by_word(parser, name.lstrip("-").replace("_", "-")):
        return _section(parser, asked, found)
    raise ValueError(f"--help={asked}: there is no such group or flag; there are the groups {', '.join(groups)}")


def _of_config(parser: argparse.ArgumentParser, asked: str) -> list[argparse.Action]:
    """The flags of the fields of one of upstream's configurations, as CacheConfig."""
    if not asked.lower().endswith("config"):
        return []
    from vllm import config

    kind = next((each for each in dir(config) if each.lower() == asked.lower()), "")
    names = set(getattr(getattr(config, kind, None), "__dataclass_fields__", ()))
    return [each for each in parser._actions if each.dest in names and each.option_strings]


def _by_word(parser: argparse.ArgumentParser, word: str) -> list[argparse.Action]:
    """The flag of that name, or else those in whose name or help the word is."""
    flags = [each for each in parser._actions if each.option_strings]
    named = [each for each in flags if any(name.lstrip("-") == word for name in each.option_strings)]
    if named:
        return named
    return [each for each in flags if any(word in text.lower() for text in (*each.option_strings, each.help or ""))]


def _section(parser: argparse.ArgumentParser, title: str, actions: list[argparse.Action]) -> str:
    formatter = parser._get_formatter()
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()
    text = formatter.format_help()
    for each in actions:
        if each.help == argparse.SUPPRESS:
            text += f"  {each.option_strings[0]}: upstream's; docs/migration.md says what becomes of it\n"
    return text
