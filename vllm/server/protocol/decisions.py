"""Requests and answers of /v1/decisions; types, limits and defaults of parts are those of openai.types.decision."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from vllm.decisions.content import NO_IMAGES
from vllm.decisions.params import MAX_PERMUTATIONS
from vllm.decisions.questions import (
    MAX_CHOICES,
    MAX_LEVELS,
    MAX_NAME,
    MAX_QUESTIONS,
    MIN_CHOICES,
    MIN_LEVELS,
)
from vllm.decisions.systemone import MAX_OPTIONS
from vllm.decisions.systemone import MAX_QUESTIONS as MAX_SYSTEMONE_QUESTIONS
from vllm.server.protocol.base import (
    ACCEPTED_FIELDS,
    UNREAD,
    EngineRequestModel,
    Object,
    RequestModel,
    ResponseModel,
)

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=r"\S")]
Filled = Annotated[str, Field(pattern=r"\S")]
Status = Literal["in_progress", "completed", "incomplete"]


class Breakpoint(TypedDict):
    mode: Literal["explicit"]


class InputText(TypedDict):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: NotRequired[Breakpoint | None]


class InputJson(TypedDict):
    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]


class InputImage(TypedDict):
    """A picture, for models that read them."""

    type: Literal["input_image"]
    image_url: str
    detail: NotRequired[Literal["auto", "low", "high", "original"] | None]


class QuestionText(TypedDict):
    type: Literal["input_text"]
    text: str


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str


class OutputRefusal(TypedDict):
    type: Literal["refusal"]
    refusal: str


class UserMessage(TypedDict):
    role: Literal["user"]
    content: str | list[InputText | InputJson | InputImage]
    type: NotRequired[Literal["message"]]


class InstructionMessage(TypedDict):
    role: Literal["developer", "system"]
    content: str | list[InputText]
    type: NotRequired[Literal["message"]]


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | list[OutputText | OutputRefusal]
    phase: NotRequired[Literal["commentary", "final_answer"] | None]
    type: NotRequired[Literal["message"]]


class FunctionCall(TypedDict):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    id: NotRequired[str | None]
    namespace: NotRequired[str | None]
    status: NotRequired[Status | None]


class CustomToolCall(TypedDict):
    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: str
    id: NotRequired[str | None]
    namespace: NotRequired[str | None]
    status: NotRequired[Status | None]


class ToolOutput(TypedDict):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | list[InputText | InputImage]
    id: NotRequired[str | None]
    status: NotRequired[Status | None]


Instructions = str | list[QuestionText | InputJson]


class PredicateQuestion(TypedDict):
    type: Literal["predicate"]
    instructions: Instructions
    name: NotRequired[Name]


class ChoiceValue(TypedDict):
    value: Filled | bool
    description: NotRequired[str | None]


class ChoiceQuestion(TypedDict):
    type: Literal["choice"]
    instructions: Instructions
    choices: Annotated[list[ChoiceValue], Field(min_length=MIN_CHOICES, max_length=MAX_CHOICES)]
    name: NotRequired[Name]


class ScoreLevel(TypedDict):
    label: Filled
    description: NotRequired[str | None]


class ScoreQuestion(TypedDict):
    type: Literal["score"]
    instructions: Instructions
    levels: Annotated[list[ScoreLevel], Field(min_length=MIN_LEVELS, max_length=MAX_LEVELS)]
    name: NotRequired[Name]


InputItem = (
    UserMessage | InstructionMessage | AssistantMessage | FunctionCall | CustomToolCall | ToolOutput
)  # an item's type and role tell which
DecisionInput = Annotated[str | list[InputItem], UNREAD]
DecisionQuestions = Annotated[
    Annotated[list[PredicateQuestion | ChoiceQuestion | ScoreQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)],
    UNREAD,
]


class CacheOptions(RequestModel):
    """OpenAI's options of prompt caching."""

    ACCEPTED: ClassVar[tuple[str, ...]] = ()

    mode: Literal["implicit", "explicit"] | None = Field(
        None, description="explicit without a breakpoint in the input: nothing cached by other requests is used."
    )
    ttl: Literal["30m"] | None = Field(None, description="Accepted; what is cached stays until its place is needed.")


class DecisionFields(EngineRequestModel):
    """Fields of both endpoints of decisions that are vLLM's or our own."""

    chat_template_kwargs: Object | None = Field(None, description="Variables of the chat template.")


_OWN_FIELDS = ("safety_identifier", "prompt_cache_key")


class DecisionRequest(DecisionFields):
    """POST /v1/decisions"""

    ACCEPTED: ClassVar[tuple[str, ...]] = tuple(name for name in ACCEPTED_FIELDS if name not in _OWN_FIELDS)
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "stream": ((False,), "a decision has no parts to stream"),
        "joint": ((False,), "joint reads are for diffusion models"),
    }

    input: DecisionInput = Field(
        description="A text, or messages, tool calls and their outputs; images cannot be seen by this server."
    )
    questions: DecisionQuestions = Field(description="Each is answered about the whole input, by itself.")
    prompt_cache_key: str | None = Field(None, description="Shares cached prefixes with equal keys only.")
    prompt_cache_options: CacheOptions | None = Field(None, description="See docs/decisions.md.")
    safety_identifier: str | None = Field(None, max_length=128, description="Accepted; changes nothing here.")
    read: Literal["auto", "labels", "values"] | None = Field(
        None, description="Read labels that stand for the options, or the options' own texts; else as the model's size."
    )
    permutations: Annotated[int, Field(ge=1, le=MAX_PERMUTATIONS)] | None = Field(
        None, description="Orders of the options to average over; 1 when left out."
    )
    min_label_mass: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="A question with a smaller label mass is answered by a refusal."
    )
    calibration: Object | None = Field(
        None, description="temperature and bias, for all questions or by types and names; {} switches the server's off."
    )
    diagnostics: bool | None = Field(None, description="Add to each answer how it came about.")
    return_token_ids: bool | None = Field(None, description="Add prompts' and labels' token ids to diagnostics.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Longest prompt, in tokens (-1 = as the context holds). The input loses its beginning."
    )


class OptionDiagnostics(ResponseModel):
    value: str | bool | int
    label: str = Field(description="The text that stands for the option.")
    logprob: float | None = Field(description="Log of the probability that the answer begins with the label.")
    rank: int = Field(description="Of the label's first token in the vocabulary; 1 is the most likely.")
    probability: float | None = Field(description="Share among the options, before calibration.")
    token_logprobs: list[float | None] | None = Field(None, description="Only for labels of several tokens.")
    token_ranks: list[int] | None = None
    label_token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class OrderDiagnostics(ResponseModel):
    order: list[int] = Field(description="The options' indices as the prompt lists them.")
    label_mass: float | None = Field(description="Probability that the answer begins with any label.")
    argmax_is_label: bool = Field(description="Whether the most likely next token begins a label.")
    lse: float | None = Field(description="Log-sum-exp of the logits at the answer's first token.")
    options: list[OptionDiagnostics]
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class AnswerDiagnostics(OrderDiagnostics):
    """The first order, which is the question's own, but label_mass and argmax_is_label over all orders."""

    read: Literal["labels", "values"] = Field(description="What stood for the options.")
    order_sensitivity: float | None = Field(
        None, description="Greatest total variation distance of an order's shares from their mean."
    )
    orders: list[OrderDiagnostics] | None = Field(None, description="With permutations.")


class OrderSensitivity(ResponseModel):
    """All that is there with permutations and without diagnostics."""

    order_sensitivity: float


class PredicateAnswerFields(ResponseModel):
    type: Literal["predicate"]
    name: str | None
    probability: float | None = Field(description="That it is true.")
    diagnostics: AnswerDiagnostics | OrderSensitivity | None = None


class ChoiceShare(ResponseModel):
    value: str | bool
    probability: float | None


class ChoiceAnswerFields(ResponseModel):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    probabilities: list[ChoiceShare]
    confidence: float | None = Field(description="The choice's probability times the label mass.")
    diagnostics: AnswerDiagnostics | OrderSensitivity | None = None


class LevelShare(ResponseModel):
    value: int
    label: str
    probability: float | None


class ScoreAnswerFields(ResponseModel):
    type: Literal["score"]
    name: str | None
    score: float | None = Field(description="The expected index of the level.")
    probabilities: list[LevelShare]
    confidence: float | None = Field(description="The most probable level's probability times the label mass.")
    diagnostics: AnswerDiagnostics | OrderSensitivity | None = None


class RefusalFields(ResponseModel):
    type: Literal["refusal"]
    name: str | None
    diagnostics: AnswerDiagnostics | OrderSensitivity | None = None


class InputTokensDetails(ResponseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int


class DecisionUsageFields(ResponseModel):
    input_tokens: int = Field(description="Of all prompts; each holds the whole input.")
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(description="Positions read, one a question; nothing is generated.")
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class DecisionResponse(ResponseModel):
    model: str
    answers: list[PredicateAnswerFields | ChoiceAnswerFields | ScoreAnswerFields | RefusalFields]
    usage: DecisionUsageFields


class ChoiceCriteria(TypedDict):
    type: Literal["choice"]
    instructions: NotRequired[str | None]
    criteria: Annotated[dict[Filled, str | None], Field(min_length=1, max_length=MAX_OPTIONS)]


class TruthCriteria(TypedDict, total=False):
    true: str | None
    false: str | None


class NoulCriteria(TypedDict):
    type: Literal["noul"]
    instructions: NotRequired[str | None]
    criteria: NotRequired[TruthCriteria | None]


class ScoreCriteria(TypedDict):
    type: Literal["score"]
    instructions: NotRequired[str | None]
    criteria: Annotated[list[Filled], Field(min_length=2, max_length=MAX_LEVELS)]


SystemOneQuestions = Annotated[
    Annotated[
        dict[Annotated[str, Field(min_length=1)], ChoiceCriteria | NoulCriteria | ScoreCriteria],
        Field(min_length=1, max_length=MAX_SYSTEMONE_QUESTIONS),
    ],
    UNREAD,
]


class SystemOneRequest(DecisionFields):
    """POST /v1/systemone"""

    ACCEPTED: ClassVar[tuple[str, ...]] = ()
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "joint": ((False,), "joint reads are for diffusion models"),
        "images": (([],), NO_IMAGES),
        "audio": (([],), "this server takes text input only"),
        "videos": (([],), "this server takes text input only"),
    }

    state: Any = Field(description="What the questions are about: a text, or any JSON, which is shown as its text.")
    questions: SystemOneQuestions = Field(description="By id, asked in this order, each by itself.")
    instructions: str | None = Field(None, description="Further context, ahead of every question.")


class ChoiceResult(ResponseModel):
    type: Literal["choice"]
    choice: str
    probabilities: dict[str, float | None]
    confidence: float | None


class NoulResult(ResponseModel):
    type: Literal["noul"]
    noul: float | None = Field(description="Probability of yes.")
    probabilities: dict[str, float | None]
    confidence: float | None


class ScoreResult(ResponseModel):
    type: Literal["score"]
    score: float | None = Field(description="The expected index of the level.")
    legend: dict[str, str]
    probabilities: dict[str, float | None]
    confidence: float | None


class LabelDiagnostics(ResponseModel):
    label_mass: float | None
    argmax_is_label: bool


class SystemOneUsage(ResponseModel):
    input_tokens: int
    output_tokens: int


class SystemOneResponse(ResponseModel):
    id: str
    object: Literal["structured_decision"]
    created: int
    model: str
    answers: dict[str, ChoiceResult | NoulResult | ScoreResult]
    usage: SystemOneUsage
    diagnostics: dict[str, LabelDiagnostics]
