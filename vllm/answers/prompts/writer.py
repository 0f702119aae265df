"""The writer of conversations by a chat template, in the forms that the template reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.answers.prompts.content_forms import (
    FORMS,
    ContentForm,
    Message,
    chosen_template,
    formed,
    forms_of_template,
    pictures_of_template,
    variables,
    words_of_medium,
)
from vllm.answers.prompts.conversations import (
    SOURCE,
    content_text,
    fitted,
    has_pictures,
    is_picture,
    named_conversations,
)
from vllm.answers.prompts.tool_prompts import ToolPrompt, shows_tools, with_told_tools
from vllm.exceptions import VLLMValidationError, shown
from vllm.inputs import TokensPrompt
from vllm.inputs.images import ReadMedia
from vllm.inputs.media import PictureSource
from vllm.logger import init_logger, warn_once
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.checks import check_boolean, check_encodable, wrong_type

if TYPE_CHECKING:
    from vllm.v1.engine.input_processor import InputProcessor

logger = init_logger(__name__)

# Arguments of transformers' apply_chat_template that LLM.chat has, or that would make the result no text.
_RESERVED = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation max_length padding "
    "return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs tools truncation".split()
)
_FORMATS = ("auto", "string", "openai")
# Stands for words, or behind them, to see what becomes of them.
_MARK = "zqmark"
_CHANGED = (
    "the chat template leaves out or changes words: a prompt does not hold the last user's text as it was sent; "
    "the template begins with %s"
)


class ChatWriter:
    """Writes conversations by a template. Arguments and errors are those of `render_texts`."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        content_format: str = "auto",
        tool_prompt: ToolPrompt | None = None,
        media: ReadMedia | None = None,
        usual_template: str | None = None,
    ) -> None:
        _check_arguments(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        if content_format not in _FORMATS:
            message = f"chat_template_content_format must be one of {', '.join(_FORMATS)}, got {shown(content_format)}"
            raise VLLMValidationError(message, "chat_template_content_format", content_format)
        if tokenizer is None:
            raise VLLMValidationError("chat needs a tokenizer, and skip_tokenizer_init left it out", "messages")
        template = chosen_template(tokenizer.chat_template or usual_template, chat_template or None, tools)
        if template is None:
            missing = "the model's tokenizer has no chat template; pass one as chat_template"
            raise VLLMValidationError(missing, "chat_template")
        self._tokenizer, self._template, self._format = tokenizer, template, content_format
        self._told = tool_prompt if tool_prompt is not None and not shows_tools(template) else None
        self.is_continued = continue_final_message
        self._media = media or ReadMedia()
        self._own_template = tokenizer.chat_template
        self._options = {
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }

    def write(self, name: str, conversation: Sequence[Message]) -> Written:
        """A conversation of `named_conversations`, with the parts of contents. `name`: in errors."""
        conversation = fitted(conversation, self._template)
        if self._told is not None:
            conversation = with_told_tools(conversation, self._told, "system" in _forms(self._template))
        pictures = [part[SOURCE] for each in conversation for part in _parts(each["content"]) if is_picture(part)]
        if pictures:
            conversation = self._with_places(conversation, pictures)
        problem: VLLMValidationError | None = None
        for forms in self._ways():
            usual = forms.get("user", "text")
            messages = [
                {**each, "content": self._formed(each, forms.get(each["role"], usual))} for each in conversation
            ]
            try:
                text = self.rendered(name, messages)
                self._check_words(name, messages, text, usual)
            except VLLMValidationError as error:
                problem = problem or error
            else:
                return Written(text, name, messages, self, tuple(pictures))
        assert problem is not None, "there is a way"
        raise problem

    @property
    def hides_tools(self) -> bool:
        """Whether there are tools, and prompts do not tell of them."""
        is_told = self._told is not None and bool(self._told.tools)
        return bool(self._options["tools"]) and not is_told and not shows_tools(self._template)

    def rendered(self, name: str, messages: list[Message], **options: Any) -> str:
        """Messages as the template writes them, with other `options` of it."""
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **{**self._options, **options})
        except Exception as error:  # a template is a program: it may raise anything, often on purpose
            reason = error or type(error).__name__
            raise VLLMValidationError(f"{name}: the chat template failed: {reason}", name) from error
        if not text:
            raise VLLMValidationError(f"{name}: the chat template made an empty prompt", name)
        check_encodable(name, text)
        return text

    def _formed(self, message: Message, form: ContentForm) -> str | list[dict[str, Any]]:
        """The message's content. With pictures it is one of parts, whatever the form of others is."""
        if not has_pictures(message["content"]):
            return formed(message["content"], form)
        names = {kind: roles[message["role"]] for kind, roles in self._pictures.items() if message["role"] in roles}
        return formed(message["content"], "parts", names)

    @cached_property
    def _pictures(self) -> Mapping[str, Mapping[str, str]]:
        """See `pictures_of_template`, by kind; empty: contents are to be texts."""
        if self._format == "string":
            return {}
        try:
            return {kind: pictures_of_template(self._template, kind) for kind in self._media.words}
        except Exception:  # what cannot be compiled; rendering says why
            return {}

    def _writes(self, part: Mapping[str, Any], role: str) -> bool:
        """Whether the template writes a picture's part in a role's messages."""
        return role in self._pictures.get(part["type"], {})

    def _with_places(self, conversation: Sequence[Message], pictures: Sequence[PictureSource]) -> list[Message]:
        """The conversation with its pictures where the template writes them: those of a tool's result in a user's
        message behind it, if need be, and without any help of the template as the model's word for one.

        Raises:
            VLLMValidationError: texts have the word.
        """
        texts = [part["text"] for each in conversation for part in _parts(each["content"]) if not is_picture(part)]
        for word in self._media.words.values():
            if any(word in text for text in texts):
                message = f"a text beside pictures has {word!r}, which stands for one: leave it out"
                raise VLLMValidationError(message, pictures[0].name.partition("[")[0])
        result: list[Message] = []
        moved: list[dict[str, Any]] = []
        for each in conversation:
            role, content = each["role"], each["content"]
            if role != "tool" and moved:
                result.append({"role": "user", "content": moved})
                moved = []
            own = [part for part in _parts(content) if is_picture(part)]
            unwritten = [part for part in own if not self._writes(part, role)]
            if unwritten:
                if role == "tool" and all(self._writes(part, "user") for part in own):
                    moved += own
                    each = {**each, "content": content_text(content)}
                else:
                    each = {**each, "content": self._with_words(content, unwritten, role)}
            result.append(each)
        return [*result, {"role": "user", "content": moved}] if moved else result

    def _with_words(self, content: list[dict[str, Any]], unwritten: list[dict[str, Any]], role: str) -> Any:
        """The content with texts for what the template does not write: in its place where the template reads parts, or
        that is asked for; else before the others, as upstream has it."""
        words = {id(part): {"type": "text", "text": self._words[part["type"]]} for part in unwritten}
        if self._media.interleaved or len(unwritten) < sum(map(is_picture, content)) or self._reads_parts(role):
            return [words.get(id(part), part) for part in content]
        return [*words.values(), *(part for part in content if id(part) not in words)]

    def _reads_parts(self, role: str) -> bool:
        forms = {} if self._format == "string" else _forms(self._template)
        return self._format == "openai" or forms.get(role, forms.get("user")) == "parts"

    @cached_property
    def _words(self) -> Mapping[str, str]:
        """The texts for media that the template does not write: those of the template, where it is to read texts, or of
        the model's; else the model's own words."""
        found = dict(self._media.words)
        for kind in found:
            for template in (self._template, self._own_template):
                try:
                    own = words_of_medium(template, kind) if template else None
                except Exception:  # what cannot be compiled; rendering says why
                    own = None
                if own:
                    found[kind] = own
                    break
        return found

    def _ways(self) -> Iterator[Mapping[str, ContentForm]]:
        """The forms of roles' contents, to be tried one after the other."""
        if self._format == "string":
            yield {}
            return
        forms = _forms(self._template)
        if self._format == "openai":
            whole: dict[str, ContentForm] = {role: "part" for role, form in forms.items() if form == "part"}
            yield {"user": "parts", **whole}
        elif "user" in forms:
            yield forms
        else:
            # It asks for more than a conversation.
            yield from ({"user": form} for form in FORMS)

    def _check_words(self, name: str, messages: Sequence[Message], text: str, form: ContentForm) -> None:
        """VLLMValidationError: the prompt does not depend on what the user says last, which the template does not write
        in that form. It is logged where it changes words, or has not taken these."""
        index = max((at for at, each in enumerate(messages) if each["role"] == "user"), default=None)
        if index is None:
            return
        content = messages[index]["content"]
        missing = [each for each in _texts(content) if each.strip() not in text]
        squeezed = _squeezed(text) if missing else ""
        if all(_squeezed(each) in squeezed for each in missing):
            return
        is_lost = "messages" in variables(self._template) and _forms(self._template).get("user") != form
        if is_lost:
            other = [*messages[:index], {**messages[index], "content": _with_mark(content, replaces=True)}]
            try:
                is_lost = self.rendered(name, other) == text
            except VLLMValidationError:
                is_lost = False
        if not is_lost:
            warn_once(logger, _CHANGED, repr(self._template[:60]))
            return
        hint = "" if self._format == "auto" else f" with chat_template_content_format={self._format!r}"
        message = f"{name}[{index}].content is lost: the chat template does not write the last user's text{hint}"
        raise VLLMValidationError(message, f"{name}[{index}].content")


@dataclass(frozen=True)
class Written:
    """A conversation as a template wrote it: the prompt's text, the messages in the forms that were read, and the
    pictures that the text has places for, in its order."""

    text: str
    name: str
    messages: list[Message]
    writer: ChatWriter
    pictures: tuple[PictureSource, ...] = ()

    def opening(self, markers: Iterable[str]) -> str:
        """The beginning of the answer: all behind the last words of others. It is what the template writes
        there, with the message that is continued, if one is. "": no marker is anywhere in the prompt."""
        if not any(marker.strip() in self.text for marker in markers):
            return ""
        at = len(self.messages) - (2 if self.writer.is_continued else 1)
        if at < 0:
            return self.text
        turn = self.messages[at]
        marked = {**turn, "content": _with_mark(turn["content"])}
        try:
            text = self.writer.rendered(self.name, [*self.messages[:at], marked, *self.messages[at + 1 :]])
        except VLLMValidationError:
            text = ""
        # Calls may be written behind a content.
        if _MARK in text and not turn.get("tool_calls"):
            return text.rpartition(_MARK)[2]
        return self._added()

    def _added(self) -> str:
        """The prompt's text beyond one without the beginning of an answer, or the message that is continued."""
        rest = self.messages[:-1] if self.writer.is_continued else self.messages
        options = {"add_generation_prompt": False, "continue_final_message": False}
        try:
            other = self.writer.rendered(self.name, rest, **options)
        except VLLMValidationError:
            return ""
        pairs = enumerate(zip(self.text, other, strict=False))
        count = next((at for at, (own, its) in pairs if own != its), len(other))
        return self.text[count:]


def _forms(template: str) -> Mapping[str, ContentForm]:
    try:
        return forms_of_template(template)
    except Exception:  # what cannot be compiled; rendering says why
        return {}


def _with_mark(content: Any, replaces: bool = False) -> Any:
    """The content with a mark behind its words, or in their place."""
    if isinstance(content, str):
        return _MARK if replaces else f"{content}\n{_MARK}"
    rest = [{**each, "text": ""} if replaces and "text" in each else each for each in content]
    if not rest or "text" not in content[-1]:
        return [*rest, {"type": "text", "text": _with_mark("", replaces)}]
    return [*rest[:-1], {**content[-1], "text": _with_mark(content[-1]["text"], replaces)}]


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _squeezed(text: str) -> str:
    """Without white space and case, which templates may change."""
    return "".join(text.split()).casefold()


def _check_arguments(
    chat_template: Any, add_generation_prompt: Any, continue_final_message: Any, tools: Any, template_kwargs: Any
) -> None:
    check_boolean("add_generation_prompt", add_generation_prompt)
    check_boolean("continue_final_message", continue_final_message)
    if add_generation_prompt and continue_final_message:
        both = "continue_final_message needs add_generation_prompt=False: a message cannot be continued and followed by"
        raise VLLMValidationError(f"{both} another at once", "continue_final_message", True)
    if chat_template is not None and not isinstance(chat_template, str):
        raise wrong_type("chat_template", chat_template, "a Jinja template as a string")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise wrong_type("tools", tools, "a list of dicts")
    if template_kwargs is None:
        return
    if not isinstance(template_kwargs, Mapping):
        raise wrong_type("chat_template_kwargs", template_kwargs, "a dict")
    taken = sorted(_RESERVED.intersection(template_kwargs))
    if taken:
        raise VLLMValidationError(f"chat_template_kwargs cannot set {taken[0]!r}", "chat_template_kwargs", taken[0])


def render_conversations(
    messages: Any,
    tokenizer: Tokenizer | None,
    **options: Any,
) -> list[TokensPrompt]:
    """One prompt a conversation: the rendered text and its ids, without special tokens but those of the template.
    Arguments and errors are those of `render_texts`."""
    texts = render_texts(messages, tokenizer, **options)
    assert tokenizer is not None
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [TokensPrompt(prompt_token_ids=ids, prompt=text) for ids, text in zip(encoded, texts, strict=True)]


def render_texts(
    messages: Any,
    tokenizer: Tokenizer | None,
    **options: Any,
) -> list[str]:
    """Each conversation as a chat template writes it.

    Args:
        messages: one conversation, a list of dicts with `role` and `content`, or a list of conversations. `content` is
            a text or a list of OpenAI's text parts. Beside tool calls it may be None or missing; templates then get an
            empty text.
        tokenizer: of the model, with its template.
        chat_template: a Jinja template in place of the model's.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: leave the last message open, to be continued; needs add_generation_prompt=False.
        tools: functions that the model may call, in OpenAI's JSON schema.
        chat_template_kwargs: further variables of the template.
        content_format: "string": templates get a content as one text, whose parts are lines; "openai": as a list of
            parts; "auto": as the template reads it, a text where it reads both.
        tool_prompt: a ToolPrompt, for templates that ignore tools; None: nothing tells of them.

    Raises:
        VLLMValidationError: a malformed message (its index is named), arguments that exclude each other, no template,
            or a template that fails on a conversation, or never writes what users say in the form that it is given.
    """
    return [each.text for each in written_conversations(messages, tokenizer, **options)]


def written_conversations(
    messages: Any, tokenizer: Tokenizer | None, *, media: ReadMedia | None = None, **options: Any
) -> list[Written]:
    """`render_texts`, with what else is known of each prompt. `media`: what parts may be beside texts."""
    media = media or ReadMedia()
    conversations = named_conversations(messages, True, media)
    writer = ChatWriter(tokenizer, media=media, **options)
    return [writer.write(name, conversation) for name, conversation in conversations]


def picture_options(processor: InputProcessor) -> dict[str, Any]:
    """The arguments of `written_conversations` that say whether and how the engine's model reads pictures."""
    options: dict[str, Any] = {"media": processor.read_media}
    # Where pictures are whole prompts, models have no template.
    template = getattr(processor.pictures, "chat_template", None) if processor.read_media.words else None
    return options if template is None else options | {"usual_template": template}


def load_chat_template(template: str | Path | None) -> str | None:
    """A Jinja template: the text of the file that `template` names, or `template` itself if it is one.

    Raises:
        ValueError: it is neither a file nor, having no braces, a template.
    """
    if template is None:
        return None
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        if isinstance(template, str) and any(mark in template for mark in "{}\n"):
            return template
        raise ValueError(f"chat_template {str(template)!r} is neither a file nor a template: {error}") from None
