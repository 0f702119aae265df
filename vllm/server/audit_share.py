"""A share of a server's readings, read once more by a reference in a process of its own, never on an answer's road."""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm.auditing.statistics import abs_deltas, as_json, kl_rows, log_shares
from vllm.exceptions import CliError
from vllm.logger import init_logger
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.server.state import ServerState
from vllm.v1.engine.input_processor import ProcessedPrompt

logger = init_logger(__name__)

_READER = "vllm.auditing.second_reader"
_MODE = "raw_logprobs"
# Requests that wait for the reference; what comes beyond is counted as dropped.
_MOST_WAITING = 256
# While the server has requests, a reading is followed by a rest of so many times its seconds: on few cores even a
# process that yields to all others slows steps, which wait for the slowest of their threads.
_RESTS = 199
_WAIT_SECONDS = 0.02
_END_SECONDS = 5.0
_DELTAS = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class ServedAudit(Collector):
    """Reads a share of the requests once more, which it counts and logs.

    A request takes part if it reads logprobs of tokens: of `logprob_token_ids`, or of those that were sampled. One with
    an adapter, with embeddings or pictures, or with logprobs of another mode than raw_logprobs is skipped.
    """

    def __init__(
        self, share: float, engine: dict[str, Any], log: str | None, keeps_texts: bool, is_busy: Callable[[], bool]
    ) -> None:
        """
        Args:
            share: probability that a request is read again.
            engine: EngineArgs of the reference.
            log: file that gets a line of JSON for each; None: there is none.
            keeps_texts: whether prompts and answers are in it, too.
            is_busy: whether the server has requests.

        Raises:
            OSError: the file cannot be written.
        """
        self._share, self._keeps_texts, self._is_busy = share, keeps_texts, is_busy
        self._random = random.Random()
        self._log: IO[bytes] | None = None
        if log is not None:
            # Unbuffered: a line that the disk has no room for is not tried again.
            self._log = open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", 0)  # noqa: SIM115
        self._is_closed = False
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests of the audit's share, by what became of them", "result")
        self._rows = self._counter("rows", "Positions that were read once more")
        self._flips = self._counter("flips", "Positions whose likeliest requested token is another one")
        self._deltas = self._histogram("abs_delta_logprob", "Differences of logprobs from the reference's, in nats")
        self._kl = self._histogram("kl", "KL divergence from the reference over the requested tokens, in nats")
        self._waiting: queue.Queue[Callable[[], dict[str, Any]] | None] = queue.Queue(_MOST_WAITING)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _READER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._run, args=(engine,), name="audit-share", daemon=True)
        self._thread.start()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vllm:audit_{name}_total", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"vllm:audit_{name}", text, buckets=_DELTAS, registry=self._registry)

    def collect(self) -> Iterable[Metric]:
        """For a registry."""
        return self._registry.collect()

    def observer(self, request_id: str, prompt: ProcessedPrompt, params: Any) -> Callable[[RequestOutput], None] | None:
        """A function that is told of a request's outputs; None for one that is not to be read again."""
        reads = isinstance(params, SamplingParams) and (params.logprob_token_ids or params.logprobs is not None)
        if not reads or self._random.random() >= self._share:
            return None
        is_other = prompt.adapter_id or prompt.embeds is not None or prompt.images is not None
        if is_other or params.logprobs_mode not in (None, _MODE):
            self._requests.labels("skipped").inc()
            return None
        outputs: list[RequestOutput] = []

        def observe(output: RequestOutput) -> None:
            if params.output_kind != RequestOutputKind.DELTA:
                outputs.clear()
            outputs.append(output)
            if output.finished:
                self._add(request_id, prompt, params, outputs)

        return observe

    def close(self) -> None:
        """End the process; waiting requests are not read."""
        self._is_closed = True
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(_END_SECONDS)
        if self._log is not None:
            self._log.close()

    def _add(
        self, request_id: str, prompt: ProcessedPrompt, params: SamplingParams, outputs: list[RequestOutput]
    ) -> None:
        for index in range(len(outputs[-1].outputs)):
            own = [each for output in outputs for each in output.outputs if each.index == index]
            try:
                self._waiting.put_nowait(lambda own=own: self._job(request_id, prompt, params, own))  # type: ignore[misc]
            except queue.Full:
                self._requests.labels("dropped").inc()

    def _job(
        self, request_id: str, prompt: ProcessedPrompt, params: SamplingParams, parts: list[CompletionOutput]
    ) -> dict[str, Any]:
        """A completion and what was read of it."""
        tokens = [token for part in parts for token in part.token_ids]
        positions = [position for part in parts for position in part.logprobs or ()]
        if params.logprob_token_ids:
            read = [list(params.logprob_token_ids)] * len(positions)
        else:
            read = [[token] for token in tokens]
            del positions[len(tokens) :]  # max_tokens=0 reads one that has no token
        # A reading without a token is of the one that would come.
        own = tokens or [token for ids in read[:1] for token in ids[:1]]
        served = [[position[token].logprob for token in ids] for position, ids in zip(positions, read, strict=True)]
        start = len(prompt.token_ids)
        texts = {"prompt": prompt.text, "text": "".join(part.text for part in parts)} if self._keeps_texts else {}
        return {
            "job": {"token_ids": [*prompt.token_ids, *own], "start": start, "read": read},
            "row": {
                "request_id": request_id,
                "num_prompt_tokens": start,
                "token_ids": read,
                "logprobs": served,
                **texts,
            },
        }

    def _run(self, engine: dict[str, Any]) -> None:
        """The thread: ask the process, count and log what it says."""
        try:
            self._ask({"engine": engine})
            logger.info("the audit's reference is ready")
            while (made := self._waiting.get()) is not None:
                try:
                    found = made()
                    if not found["row"]["logprobs"]:
                        continue
                except (KeyError, ValueError, IndexError) as error:
                    self._failed(f"its readings have another form: {error!r}")
                    continue
                began = time.monotonic()
                answer = self._ask(found["job"])
                seconds = time.monotonic() - began
                if "error" in answer:
                    self._failed(answer["error"])
                else:
                    self._note(found["row"], answer["logprobs"])
                self._rest(seconds)
        except (OSError, ValueError, EOFError) as error:
            if self._is_closed:
                return
            logger.error("the audit's reference has ended, and no request is read once more: %s", error)
            self._share = 0.0

    def _rest(self, seconds: float) -> None:
        """Leave the machine to the server after a reading that took `seconds`, unless it has nothing to do."""
        ends = time.monotonic() + _RESTS * seconds
        while time.monotonic() < ends and self._is_busy() and not self._is_closed:
            time.sleep(_WAIT_SECONDS)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(question)}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"exit status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "failure" in answer:
            self._process.wait()
            raise ValueError(answer["failure"])
        return answer

    def _failed(self, why: str) -> None:
        self._requests.labels("failed").inc()
        logger.warning("a request could not be read once more: %s", why)

    def _note(self, row: dict[str, Any], reference: list[list[float]]) -> None:
        served, expected = np.asarray(row["logprobs"], np.float64), np.asarray(reference, np.float64)
        deltas = abs_deltas(expected, served)
        row |= {"time": time.time(), "reference_logprobs": reference, "max_abs_delta_logprob": float(deltas.max())}
        for delta in deltas.ravel().tolist():
            self._deltas.observe(delta)
        if served.shape[1] > 1:
            flips = int((served.argmax(1) != expected.argmax(1)).sum())
            kl = kl_rows(log_shares(expected), log_shares(served)).tolist()
            row |= {"flips": flips, "kl": kl}
            self._flips.inc(flips)
            for each in kl:
                self._kl.observe(each)
        self._rows.inc(len(served))
        self._requests.labels("read").inc()
        self._write(f"{json.dumps(as_json(row), ensure_ascii=False)}\n".encode())

    def _write(self, line: bytes) -> None:
        if self._log is None:
            return
        try:
            if self._log.write(line) == len(line):
                return
            why = "the disk is full"
        except OSError as error:
            why = f"{error.strerror}"
        logger.error("the audit's log cannot be written, and further requests are counted alone: %s", why)
        with suppress(OSError):
            self._log.close()
        self._log = None


@contextmanager
def audited(state: ServerState) -> Iterator[None]:
    """Read a share of the server's requests once more, if its arguments ask for it. CliError: they cannot be used, or
    the reference has other tokens."""
    args, engine = state.args, state.engine
    if not args.audit_share:
        yield
        return
    from vllm.auditing.models import ModelSpec
    from vllm.auditing.vocabularies import spec_tokenizer, vocabulary_difference

    assert args.audit_reference is not None
    config, tokenizer = engine.model_config, engine.input_processor.tokenizer
    if config.logprobs_mode != _MODE or config.runner_type == "pooling" or tokenizer is None:
        raise CliError(f"--audit-share needs a model that generates, its tokenizer, and --logprobs-mode {_MODE}")
    spec = ModelSpec.parse(args.audit_reference, None)
    if spec.url is not None or spec.adapter is not None:
        raise CliError(f"--audit-reference must be a model without an adapter, got {args.audit_reference}")
    fault = vocabulary_difference(spec_tokenizer(spec), tokenizer)
    if fault is not None:
        raise CliError(f"--audit-reference {args.audit_reference} has another vocabulary: {fault}")
    own = {"max_model_len": config.max_model_len, "max_num_seqs": 1, "max_logprob_token_ids": -1}
    try:
        audit = ServedAudit(
            args.audit_share,
            {**own, **spec.engine},
            args.audit_log,
            args.audit_texts,
            lambda: engine.num_unfinished_requests > 0,
        )
    except OSError as error:
        raise CliError(f"--audit-log {args.audit_log}: {error.strerror}") from error
    state.audit, engine.observer = audit, audit.observer
    try:
        yield
    finally:
        engine.observer = None
        audit.close()
