"""Which form of a message's content a template reads: a text, or parts.

A template is a program, which may read a content through loops, filters, macros, names or tests. It is therefore asked:
short conversations are rendered in each form, and the form counts in which their words come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from vllm.answers.prompts.conversations import content_text, is_picture

ContentForm = Literal["text", "parts", "part"]
"""How a content is given: one text; a list of its parts; a list of one part with all of the text."""

PICTURE_PARTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "image": {"image": {"type": "image"}, "image_url": {"type": "image_url", "image_url": {"url": ""}}},
    "video": {"video": {"type": "video"}, "video_url": {"type": "video_url", "video_url": {"url": ""}}},
}
"""How a picture or a video is given to a template, by name: transformers' form first."""

_USUAL_NAMES = {kind: next(iter(parts)) for kind, parts in PICTURE_PARTS.items()}
FORMS: tuple[ContentForm, ...] = ("text", "parts", "part")

Message = dict[str, Any]
Content = str | Sequence[Mapping[str, Any]]

# No template has the words or the tool; a form that is printed instead of read shows the key.
_WORDS = ("zqfirst", "zqsecond")
_KEY = "zqkey"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "zqtool", "description": "zqtool", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"id": "zqcall00a", "type": "function", "function": {"name": "zqtool", "arguments": {}}}


def formed(content: Content, form: ContentForm, names: Mapping[str, str] = _USUAL_NAMES) -> str | list[dict[str, Any]]:
    """The content in a form. Only parts have pictures, each of a kind as PICTURE_PARTS[kind][names[kind]]."""
    if form == "text":
        return content_text(content)
    if form == "part" or isinstance(content, str) or not content:
        return [{"type": "text", "text": content_text(content)}]
    return [dict(PICTURE_PARTS[part["type"]][names[part["type"]]] if is_picture(part) else part) for part in content]


def readable_form(render: Callable[[Any], str]) -> ContentForm | None:
    """The first of FORMS in which a content comes out; None: in no form.

    Args:
        render: what the template makes of a content; it may raise anything.
    """
    for form in FORMS:
        words = _WORDS if form == "parts" else _WORDS[:1]
        parts = [{"type": "text", "text": word, _KEY: _KEY} for word in words]
        try:
            text = render(words[0] if form == "text" else parts).casefold()
        except Exception:  # templates raise on purpose
            continue
        if all(word in text for word in words) and _KEY not in text:
            return form
    return None


@lru_cache(maxsize=64)
def forms_of_template(template: str) -> Mapping[str, ContentForm]:
    """The form of each role's content that a chat template reads; of several the text. A role whose messages come out
    in no form is left out."""
    # Some templates are for conversations with tools alone.
    return _forms(template, None) or _forms(template, [PROBE_TOOL])


def _needed_tools(template: str) -> list[dict[str, Any]] | None:
    """The tools without which a chat template is not to be probed."""
    return None if _forms(template, None) else [PROBE_TOOL]


def _forms(template: str, tools: list[dict[str, Any]] | None) -> dict[str, ContentForm]:
    found: dict[str, ContentForm] = {}
    for role in ("user", "assistant", "system", "developer", "tool"):

        def render(content: Any, role: str = role) -> str:
            return probed(template, _conversation(role, content, found), tools)

        form = readable_form(render)
        if form is not None:
            found[role] = form
    return found


@lru_cache(maxsize=64)
def pictures_of_template(template: str, kind: str = "image") -> Mapping[str, str]:
    """The name in PICTURE_PARTS[kind] of the part that makes a chat template write a picture, by the message's role.
    Roles in whose messages it writes none are left out."""
    forms, tools = dict(forms_of_template(template)), _needed_tools(template)
    found = {}
    for role in ("user", "assistant", "system", "developer", "tool"):
        for name, part in PICTURE_PARTS[kind].items():
            if _writes(template, role, dict(part), forms, tools):
                found[role] = name
                break
    return found


@lru_cache(maxsize=64)
def words_of_medium(template: str, kind: str) -> str | None:
    """The text that a chat template writes for a picture or a video in a user's message; None: it writes none."""
    name = pictures_of_template(template, kind).get("user")
    if name is None:
        return None
    before, after = ({"type": "text", "text": word} for word in _WORDS)
    forms, tools = forms_of_template(template), _needed_tools(template)
    between = []
    for parts in ([before, dict(PICTURE_PARTS[kind][name]), after], [before, after]):
        text = probed(template, _conversation("user", parts, forms), tools)
        start, end = (text.lower().find(word) for word in _WORDS)
        between.append(text[start + len(_WORDS[0]) : end])
    return between[0].removesuffix(between[1])


def _writes(template: str, role: str, picture: Message, forms: Mapping[str, ContentForm], tools: Any) -> bool:
    """Whether the part makes a difference between words that stay, and is not printed."""
    before, after = ({"type": "text", "text": word} for word in _WORDS)
    made = []
    for parts in ([before, picture | {_KEY: _KEY}, after], [before, after]):
        try:
            made.append(probed(template, _conversation(role, parts, forms), tools))
        except Exception:  # templates raise on purpose
            return False
    has_words = all(word in each.casefold() for word in _WORDS for each in made)
    return has_words and made[0] != made[1] and _KEY not in made[0]


def probed(template: str, conversation: list[Message], tools: list[dict[str, Any]] | None) -> str:
    """The text that a chat template makes of a conversation, without a tokenizer; it may raise anything."""
    from transformers.utils.chat_template_utils import render_jinja_template

    options: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    options |= {"chat_template": template, "add_generation_prompt": True, "tools": tools}
    rendered: Any = render_jinja_template([conversation], **options)
    return rendered[0][0]


def reads_texts(template: str) -> bool:
    """Whether a chat template reads a user's content as a text, be it beside parts."""
    try:
        form = forms_of_template(template).get("user")
    except Exception:  # what cannot be compiled reads nothing
        return True
    return form == "text" if form is not None else not goes_through_contents(template)


def _conversation(role: str, content: Any, forms: Mapping[str, ContentForm]) -> list[Message]:
    """A conversation with a message of the role; other messages are in their forms."""
    own: Message = {"role": role, "content": content}
    user = {"role": "user", "content": formed("x", forms.get("user", "text"))}
    if role == "assistant":
        return [user, own, user]
    if role == "tool":
        empty = formed("", forms.get("assistant", forms.get("user", "text")))
        call = {"role": "assistant", "content": empty, "tool_calls": [_CALL]}
        return [user, call, {**own, "tool_call_id": _CALL["id"], "name": "zqtool"}]
    return [own] if role == "user" else [own, user]


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
