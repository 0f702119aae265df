"""Parts of a command's help: --help=GROUP, =FLAG or a word, =listgroup, =all."""

from __future__ import annotations

import argparse

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
