"""Decisions in one pass, against one request a question and against the computation that their tokens need.

    python benchmarks/decisions.py                                  # the embedded model; all rows take minutes
    python benchmarks/decisions.py --states 1000 --questions 64 --clients 1
    python benchmarks/decisions.py --served                         # clients of a server, each with a request at a time

Each row has fresh states, one a client, with the same questions, in several ways, by turns:

- decide: LLM.decide with all of them.
- requests: the same prompts as requests of their own, a client's one after another, which read the labels of one
  position by logprob_token_ids; each finds the state in the prefix cache.
- uncached (`--uncached`): the same on an engine without a prefix cache, for at most 8 questions, its time scaled.
- prefill: as many fresh tokens as the decisions computed, in prompts of the state's length: their cost by themselves.

With `--served` the clients are tasks that talk to `vllm serve` by HTTP: a client's decide is one POST /v1/decisions,
its requests are POST /v1/completions, one after another. Times are from the first request to the last client's last
answer.

Prints the median seconds of the rounds and their ratios to `decide`, and JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from common import add_counts, make_parser, print_result, say, use_all_cores
from servers import serve_for_probes

from vllm.utils.server_client import ServerClient

_WORDS = (
    "the a customer order parcel late broken screen refund billing card charged twice please help support team we "
    "asked again on Monday but nobody answered so it was sent back by train with all papers and a short letter"
).split()
_MOST_UNCACHED = 8


def make_questions(count: int) -> list[dict[str, Any]]:
    """Choices of three options, none of them alike."""
    choices = [{"value": value} for value in ("billing", "shipping", "security")]
    texts = [f"Request {number}: which team answers for the {_WORDS[number % len(_WORDS)]}?" for number in range(count)]
    return [{"type": "choice", "instructions": text, "choices": choices} for text in texts]


def make_state(tokenizer: Any, num_tokens: int, seed: int) -> str:
    """A text of about so many tokens that no other seed begins with."""
    words = random.Random(seed).choices(_WORDS, k=2 * num_tokens)
    ids = tokenizer.encode(f"{seed}: " + " ".join(words), add_special_tokens=False)
    return tokenizer.decode(ids[:num_tokens])


class Ways(Protocol):
    """The ways to measure, on engines that are started once."""

    has_uncached: bool

    def states(self, count: int, num_tokens: int) -> list[str]:
        """Fresh ones."""

    def decide(self, states: list[str], questions: list[dict[str, Any]]) -> tuple[float, int]:
        """Seconds, and tokens computed."""

    def requests(self, states: list[str], questions: list[dict[str, Any]], cached: bool = True) -> float:
        """Seconds of one question after another, all clients at a time."""

    def prefill(self, num_tokens: int, length: int) -> float:
        """Seconds of that many fresh tokens, in prompts of `length`."""


class OfflineWays:
    """LLM in this process."""

    def __init__(self, model: str | None, with_uncached: bool) -> None:
        from vllm import LLM

        self.llm = LLM(model, seed=0, max_model_len=8192)
        self.has_uncached = with_uncached
        if with_uncached:
            self.uncached = LLM(model, seed=0, max_model_len=8192, enable_prefix_caching=False)
        self._seeds = iter(range(10**9))

    def states(self, count: int, num_tokens: int) -> list[str]:
        tokenizer = self.llm.llm_engine.tokenizer
        return [make_state(tokenizer, num_tokens, next(self._seeds)) for _ in range(count)]

    def decide(self, states: list[str], questions: list[dict[str, Any]]) -> tuple[float, int]:
        began = time.perf_counter()
        decisions = self.llm.decide(states, questions, use_tqdm=False)
        spent = time.perf_counter() - began
        return spent, sum(each.usage.input_tokens - each.usage.cached_tokens for each in decisions)

    def requests(self, states: list[str], questions: list[dict[str, Any]], cached: bool = True) -> float:
        from vllm import SamplingParams
        from vllm.decisions.plan import DecisionPlan

        llm = self.llm if cached else self.uncached
        spent = 0.0
        plans = [
            DecisionPlan(llm.model_config, llm.llm_engine.tokenizer, state, questions).requests() for state in states
        ]
        for together in zip(*plans, strict=True):
            prompts = [{"prompt_token_ids": prompt.token_ids} for prompt, _ in together]
            ids = list(together[0][1].logprob_token_ids)
            params = SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=ids)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            spent += time.perf_counter() - began
        return spent

    def prefill(self, num_tokens: int, length: int) -> float:
        from vllm import SamplingParams

        tokenizer = self.llm.llm_engine.tokenizer
        prompts = [{"prompt_token_ids": ids} for ids in fresh_prompts(tokenizer, self._seeds, num_tokens, length)]
        params = SamplingParams(temperature=0.0, max_tokens=0, logprob_token_ids=[0])
        began = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began


class ServedWays:
    """Clients of a server."""

    has_uncached = False

    def __init__(self, url: str, tokenizer: Any) -> None:
        self._url, self._tokenizer = url, tokenizer
        self._seeds = iter(range(10**9))

    def states(self, count: int, num_tokens: int) -> list[str]:
        return [make_state(self._tokenizer, num_tokens, next(self._seeds)) for _ in range(count)]

    def decide(self, states: list[str], questions: list[dict[str, Any]]) -> tuple[float, int]:
        async def client(server: ServerClient, state: str) -> int:
            answer = await server.post("/v1/decisions", {"input": state, "questions": questions})
            return answer["usage"]["input_tokens_details"]["cache_write_tokens"]

        spent, counts = self._together(client, states)
        return spent, sum(counts)

    def requests(self, states: list[str], questions: list[dict[str, Any]], cached: bool = True) -> float:
        async def client(server: ServerClient, bodies: list[dict[str, Any]]) -> None:
            for body in bodies:
                await server.post("/v1/completions", body)

        _, bodies = self._together(lambda server, state: self._bodies(server, state, questions), states)
        return self._together(client, bodies)[0]

    def prefill(self, num_tokens: int, length: int) -> float:
        prompts = fresh_prompts(self._tokenizer, self._seeds, num_tokens, length)
        body = {"prompt": prompts, "max_tokens": 0, "logprob_token_ids": [0]}
        return self._together(lambda server, own: server.post("/v1/completions", own), [body])[0]

    @staticmethod
    async def _bodies(server: ServerClient, state: str, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The requests that read what a decision reads; the one that tells them leaves nothing in their cache."""
        asked = {"input": state, "questions": questions, "return_token_ids": True, "cache_salt": "another"}
        answer = await server.post("/v1/decisions", asked)
        read = [each["diagnostics"] for each in answer["answers"]]
        return [
            {
                "prompt": each["prompt_token_ids"],
                "logprob_token_ids": [option["label_token_ids"][0] for option in each["options"]],
                "max_tokens": 1,
                "temperature": 0,
            }
            for each in read
        ]

    def _together(
        self, client: Callable[[ServerClient, Any], Awaitable[Any]], work: Sequence[Any]
    ) -> tuple[float, list[Any]]:
        """Seconds until all clients, each with one of `work`, are done, and their results."""

        async def run() -> tuple[float, list[Any]]:
            servers = [ServerClient(self._url) for _ in work]
            began = time.perf_counter()
            results = await asyncio.gather(*(map(client, servers, work)))
            spent = time.perf_counter() - began
            for server in servers:
                await server.close()
            return spent, results

        return asyncio.run(run())


@contextlib.contextmanager
def served_ways(model: str | None) -> Iterator[ServedWays]:
    """The measurements of a server that runs meanwhile."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import load_tokenizer

    tokenizer = load_tokenizer(EngineArgs(model=model).create_engine_config().model_config)
    with serve_for_probes(model, "--max-model-len", "8192") as serving:
        yield ServedWays(serving.url, tokenizer)


def fresh_prompts(tokenizer: Any, seeds: Iterator[int], num_tokens: int, length: int) -> list[list[int]]:
    """Prompts of `num_tokens` in all, of `length` each but for the last."""
    lengths = [min(length, num_tokens - start) for start in range(0, num_tokens, length)]
    return [(tokenizer.encode(make_state(tokenizer, 2 * each, next(seeds))) * 2)[:each] for each in lengths]


def measure(ways: Ways, num_questions: int, num_tokens: int, clients: int, rounds: int) -> dict[str, Any]:
    """One row."""
    questions = make_questions(num_questions)
    few = questions[:_MOST_UNCACHED]
    seconds: dict[str, list[float]] = {}
    computed = 0
    for _ in range(rounds):
        spent, computed = ways.decide(ways.states(clients, num_tokens), questions)
        seconds.setdefault("decide", []).append(spent)
        own = ways.requests(ways.states(clients, num_tokens), questions)
        seconds.setdefault("requests", []).append(own)
        seconds.setdefault("prefill", []).append(ways.prefill(computed, num_tokens))
        if ways.has_uncached:
            own = ways.requests(ways.states(clients, num_tokens), few, cached=False)
            seconds.setdefault("uncached", []).append(own * len(questions) / len(few))
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    ratios = {f"{way}_to_decide": round(spent / medians["decide"], 2) for way, spent in medians.items()}
    rounded = {way: round(spent, 3) for way, spent in medians.items()}
    return {"questions": num_questions, "state_tokens": num_tokens, "computed": computed, "seconds": rounded, **ratios}


def main() -> None:
    """Measure, print text and JSON."""
    parser = make_parser(
        "Decisions in one pass, against one request a question and against the prefill of their tokens."
    )
    for name, default in (("states", "100,1000,4000"), ("questions", "1,8,64,200")):
        parser.add_argument(f"--{name}", default=default, help="comma-separated counts (default: %(default)s)")
    parser.add_argument("--uncached", action="store_true", help="also one request a question without a prefix cache")
    parser.add_argument("--served", action="store_true", help="over HTTP, each client by itself")
    add_counts(parser, clients=(8, "states that are decided at once"), rounds=(3, ""))
    args = parser.parse_args()
    if args.served and args.uncached:
        parser.error("--uncached is not for --served")
    use_all_cores()
    rows = []
    engine = served_ways(args.model) if args.served else contextlib.nullcontext(OfflineWays(args.model, args.uncached))
    with engine as ways:
        measure(ways, 2, 50, 1, 1)  # what is made on first use
        for num_tokens in map(int, args.states.split(",")):
            for num_questions in map(int, args.questions.split(",")):
                rows.append(measure(ways, num_questions, num_tokens, args.clients, args.rounds))
                say(str(rows[-1]))
    print_result(served=args.served, clients=args.clients, rounds=args.rounds, rows=rows)


if __name__ == "__main__":
    main()
