"""`vllm score` as a teacher: readings of rollouts, by an engine in this process, a server, or a Ray cluster."""

from __future__ import annotations

import argparse
import base64
import io
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from vllm.exceptions import CliError, VLLMValidationError
from vllm.logprobs.divergence import STUDENT_FIELD, kl_terms, student_table
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.scoring.files import Item
from vllm.scoring.report import RowReport
from vllm.scoring.scorers import EngineScorer, Results, ServerScorer, failed
from vllm.scoring.server import Server
from vllm.scoring.task import Task
from vllm.scoring.teacher.rollouts import DIVERGENCES, NAMES, TABLES, Rollout, TeacherOptions
from vllm.utils.server_client import ServerError

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM

# A rollout of 1,024 tokens and 256 ids a position has 4 MiB of readings.
_BATCH_ROWS = 16
_PATH = "/inference/v1/generate"
_SENT = (
    "max_tokens", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_entropy",
    "logprob_ranks",
)  # fmt: skip
_TAKEN = ("prompt_token_ids", "first_position", *NAMES, "num_prompt_tokens", "error")


class TeacherTask(Task):
    """The readings of each rollout's ids, as Parquet."""

    command, suffix = "score", "teacher"
    has_parts, part_form, batch_rows, takes_ids = True, "parquet", _BATCH_ROWS, True
    more_deciding = ("max_logprobs", "max_logprob_token_ids")

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        if args.output_format not in (None, "parquet"):
            raise CliError(f"--output-format must be parquet for readings of prompts, got {args.output_format}")
        self.options = TeacherOptions(
            args.text_field,
            args.prompt_logprobs,
            args.prompt_ids_field,
            args.student_logprobs_field,
            args.prompt_start_field,
            _names(args),
        )
        self.dropped = frozenset(self.options.fields)
        self.made_from = {name: value for name, value in vars(self.options).items() if name != "names"}
        self.made_from["names"] = list(self.options.names)

    def check(self, item: Item) -> None:
        self.options.rollout(self.input_name, item)

    def engine_scorer(self, llm: LLM) -> EngineTeacher:
        return EngineTeacher(llm, self.options, self.input_name)

    def server_scorer(self, server: Server) -> ServerTeacher:
        return ServerTeacher(server, self.options, self.input_name)

    def schema(self, scorer: Any) -> pa.Schema:
        return self.options.schema()

    def report(self, scorer: Any) -> RowReport:
        raise NotImplementedError("parts have counts alone")


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    """The arrays to write: those asked for, or all that there are but the entropy, which takes a further pass."""
    has_tables = args.prompt_ids_field is not None or args.prompt_logprobs != 0
    missing = {} if has_tables else dict.fromkeys(TABLES, "needs --prompt-ids-field or --prompt-logprobs above 0")
    if args.student_logprobs_field is None:
        missing |= dict.fromkeys(DIVERGENCES, "needs --student-logprobs-field")
    for name in args.prompt_tables or ():
        if name in missing:
            raise CliError(f"--prompt-tables: {name} {missing[name]}")
    asked = args.prompt_tables or [name for name in NAMES if name not in missing and name != "entropy"]
    return tuple(name for name in NAMES if name in asked)


class EngineTeacher(EngineScorer):
    def __init__(self, llm: LLM, options: TeacherOptions, input_name: str) -> None:
        super().__init__(llm)
        self._options, self._name = options, input_name
        self.taken = (*_TAKEN, *options.fields)

    def results(self, batch: Sequence[Item], use_tqdm: bool | Callable[..., Any]) -> Iterable[Results]:
        """A rollout that cannot be read has an error."""
        rollouts = [self._options.rollout(self._name, item) for item in batch]
        asked = [self._checked(*pair) for pair in zip(rollouts, self._prompts(rollouts), strict=True)]
        usable = [each for each in asked if isinstance(each, _Asked)]
        prompts: list[Any] = [{"prompt_token_ids": each.token_ids} for each in usable]
        outputs = iter(self._llm.generate(prompts, [each.params for each in usable], use_tqdm=use_tqdm))
        for each in asked:
            yield self._read(each, next(outputs)) if isinstance(each, _Asked) else each

    def _prompts(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """The ids of each; those that are given are not checked."""
        texts = [each.text for each in rollouts if each.token_ids is None]
        if texts and self._tokenizer is None:
            raise CliError("--skip-tokenizer-init: texts cannot be read without a tokenizer")
        encoded = iter(self._tokenizer.encode_batch(texts) if texts and self._tokenizer is not None else ())
        return [next(encoded) if each.token_ids is None else each.token_ids for each in rollouts]

    def _checked(self, rollout: Rollout, token_ids: list[int]) -> _Asked | Results:
        """The engine's requests; an error where there can be none."""
        processor, count = self._llm.llm_engine.input_processor, len(token_ids)
        try:
            params = self._options.params(rollout, count)
            processor.process_prompts([token_ids], [params])
            processor.process_params(params, count)
            table = None
            if rollout.student is not None:
                table = student_table(rollout.student, params.prompt_id_table(count))
        except VLLMValidationError as error:
            return failed(str(error.args[0]), count)
        return _Asked(token_ids, params, table)

    def _read(self, asked: _Asked, output: RequestOutput) -> Results:
        error = output.outputs[0].error
        if error is not None:
            return failed(error, len(asked.token_ids))
        tables = output.prompt_tables
        assert tables is not None
        arrays = tables.arrays()
        if asked.student is not None:
            terms = kl_terms(asked.student, tables.logprobs[:, tables.num_topk :])
            arrays |= {"reverse_kl": terms.reverse, "forward_kl": terms.forward}
        return self._options.results(asked.token_ids, arrays)


class ServerTeacher(ServerScorer):
    """See EngineTeacher. The server tokenises texts."""

    def __init__(self, server: Server, options: TeacherOptions, input_name: str) -> None:
        super().__init__(server)
        self._options, self._name = options, input_name
        self.taken = (*_TAKEN, *options.fields)

    async def result(self, item: Item) -> Results:
        rollout = self._options.rollout(self._name, item)
        token_ids = rollout.token_ids
        if token_ids is None:
            token_ids = (await self._server.post("/tokenize", {"prompt": rollout.text}))["tokens"]
        try:
            params = self._options.params(rollout, len(token_ids))
        except VLLMValidationError as error:
            return failed(str(error.args[0]), len(token_ids))
        own = {name: value for name in _SENT if (value := getattr(params, name)) is not None}
        body = {"token_ids": token_ids, "sampling_params": own, "encoding_format": "base64"}
        body |= {"prompt_tables": list(self._options.asked)}
        if rollout.student is not None:
            body[STUDENT_FIELD] = rollout.student
        answer = await self._server.post(_PATH, body)
        try:
            arrays = {name: _array(each) for name, each in answer["prompt_tables"].items()}
            return self._options.results(token_ids, arrays)
        except (TypeError, LookupError, ValueError):
            message = f"{_PATH}: the answer has no prompt_tables; --url must be a server of this package"
            raise CliError(message) from None

    async def refused(self, item: Item, error: ServerError) -> Results:
        """See ServerScorer; the length of ids is known."""
        token_ids = self._options.rollout(self._name, item).token_ids
        return {**await super().refused(item, error), "num_prompt_tokens": token_ids and len(token_ids)}


class _Asked(NamedTuple):
    token_ids: list[int]
    params: SamplingParams
    student: np.ndarray | None  # float32 [rows, ids]


def _array(text: str) -> np.ndarray:
    array: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array
