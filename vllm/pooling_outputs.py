"""Results of requests to pooling models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from typing_extensions import Self

from vllm.exceptions import GenerationError, VLLMValidationError

if TYPE_CHECKING:
    import torch

_O = TypeVar("_O")


@dataclass(frozen=True)
class RequestError:
    """Why a request has no outputs.

    Attributes:
        code: a word for programs.
        message: a sentence for people.
        retryable: whether the same request may succeed later.
    """

    code: str
    message: str
    retryable: bool = False

    def to_exception(self) -> GenerationError | VLLMValidationError:
        """The error to raise: the client's fault where trying again is no use."""
        return GenerationError(self.message) if self.retryable else VLLMValidationError(self.message)


@dataclass
class PoolingOutput:
    """The pooled tensor of one request, of any shape."""

    data: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and bool((self.data == other.data).all())


class PoolingRequestOutput(Generic[_O]):
    """The output of one request.

    Attributes:
        request_id: the request's name.
        outputs: what was pooled.
        prompt_token_ids: the prompt's ids.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        finished: whether the request has ended.
        error: what went wrong, and its outputs are empty then; None when nothing did.
        late_chunking: LateChunks of a request with late_chunking_params.
    """

    def __init__(
        self,
        request_id: str,
        outputs: _O,
        prompt_token_ids: list[int],
        num_cached_tokens: int,
        finished: bool,
        *,
        error: RequestError | None = None,
        late_chunking: Any | None = None,
    ) -> None:
        self.request_id = request_id
        self.outputs = outputs
        self.prompt_token_ids = prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.finished = finished
        self.error = error
        self.late_chunking = late_chunking

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(request_id={self.request_id!r}, outputs={self.outputs!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, num_cached_tokens={self.num_cached_tokens}, "
            f"finished={self.finished})"
        )


@dataclass(frozen=True)
class LateChunk:
    """A part of a text; ranges are half-open.

    Attributes:
        token_range: which of the prompt's tokens.
        char_range: which of the text's characters; None: its tokens are special ones.
    """

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None


@dataclass(frozen=True)
class LateChunks:
    """How a text was parted; one chunk for each row of the pooled tensor."""

    chunk_size: int
    input_tokens: int
    chunks: list[LateChunk]
    strategy: str = "fixed_tokens"


@dataclass
class EmbeddingOutput:
    """One embedding, float [hidden_size]."""

    embedding: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> EmbeddingOutput:
        """
        Raises:
            ValueError: the pooled tensor is no vector.
        """
        return EmbeddingOutput(_vector(pooling_output, "an embedding"))

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The probability of each class, float [num_classes]."""

    probs: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> ClassificationOutput:
        """
        Raises:
            ValueError: the pooled tensor is no vector.
        """
        return ClassificationOutput(_vector(pooling_output, "class probabilities"))

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The similarity of two texts."""

    score: float

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> ScoringOutput:
        """
        Raises:
            ValueError: the pooled tensor holds more than one number.
        """
        data = pooling_output.data.squeeze()
        if data.ndim != 0:
            raise ValueError(f"a score is one number, got a tensor of shape {tuple(pooling_output.data.shape)}")
        return ScoringOutput(float(data))


class _ReadOutput(PoolingRequestOutput[_O]):
    """A request whose tensor is read as `kind`; where it has failed, as `nothing`."""

    kind: ClassVar[Any]
    nothing: ClassVar[Any] = []

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput) -> Self:
        """The same request with its tensor read; errors as of the kind's own."""
        is_lost = request_output.error is not None
        outputs = cls.kind(cls.nothing) if is_lost else cls.kind.from_base(request_output.outputs)
        return cls(**{**vars(request_output), "outputs": outputs})


class EmbeddingRequestOutput(_ReadOutput[EmbeddingOutput]):
    """The embedding of one prompt."""

    kind = EmbeddingOutput


class ClassificationRequestOutput(_ReadOutput[ClassificationOutput]):
    """The class probabilities of one prompt."""

    kind = ClassificationOutput


class ScoringRequestOutput(_ReadOutput[ScoringOutput]):
    """The score of one pair of texts."""

    kind, nothing = ScoringOutput, 0.0


def _vector(output: PoolingOutput, what: str) -> list[float]:
    if output.data.ndim != 1:
        raise ValueError(f"{what} must be a vector, got a tensor of shape {tuple(output.data.shape)}")
    return output.data.tolist()
