"""A chat template's own text says which one is taken, and which variables it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def chosen_template(own: str | Mapping[str, str] | None, given: str | None, tools: Any) -> str | None:
    """The template of a conversation: `given` or, by its name, one of the tokenizer's `own`; else the tokenizer's, for
    tools the one that it has for these. None: there is none."""
    named: Mapping[str, str] = own if isinstance(own, Mapping) else {}
    if given is not None:
        return named.get(given, given)
    if not isinstance(own, Mapping):
        return own
    return named.get("tool_use" if tools and "tool_use" in named else "default")


def variables(template: str) -> set[str]:
    """The names that a template reads and does not set."""
    import jinja2.meta

    tree = _parsed(template)
    return set() if tree is None else jinja2.meta.find_undeclared_variables(tree)


def goes_through_contents(template: str) -> bool:
    """Whether a template has a loop over a message's content, or takes a part of one by its number."""
    import jinja2.nodes

    tree = _parsed(template)
    if tree is None:
        return False
    # Names that hold a content, such as after {% set content = message.content %}.
    names = {
        node.target.name
        for node in tree.find_all(jinja2.nodes.Assign)
        if isinstance(node.target, jinja2.nodes.Name) and _is_content(node.node, set())
    }
    if any(_is_content(node.iter, names) for node in tree.find_all(jinja2.nodes.For)):
        return True
    numbered = (node for node in tree.find_all(jinja2.nodes.Getitem) if isinstance(node.arg, jinja2.nodes.Const))
    return any(isinstance(node.arg.value, int) and _is_content(node.node, names) for node in numbered)


def _is_content(node: Any, names: set[str]) -> bool:
    import jinja2.nodes

    if isinstance(node, jinja2.nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name in names


def _parsed(template: str) -> Any:
    import jinja2
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        return _compile_jinja_template(template).environment.parse(template)
    except jinja2.TemplateError:
        return None
