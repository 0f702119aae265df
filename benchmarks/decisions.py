"""Decisions in one pass, against one request a question and against the computation that their tokens need.

    python benchmarks/decisions.py                                  # the embedded model; all rows take minutes
    python benchmarks/decisions.py --states 1000 --questions 64 --clients 1

Each row has fresh states, one a client, with the same questions, in several ways, by turns:

- decide: LLM.decide with all of them.
- requests: the same prompts as requests of their own, a client's one after another, which read the labels of one
  position by logprob_token_ids; each finds the state in the prefix cache.
- uncached (`--uncached`): the same on an engine without a prefix cache, for at most 8 questions, its time scaled.
- prefill: as many fresh tokens as the decisions computed, in prompts of the state's length: their cost by themselves.

Prints the median seconds of the rounds and their ratios to `decide`, and JSON.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from common import add_counts, make_parser, print_result, say, use_all_cores

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


class Ways:
    """The ways to measure, on engines that are started once."""

    def __init__(self, model: str | None, with_uncached: bool) -> None:
        from vllm import LLM

        self.llm = LLM(model, seed=0, max_model_len=8192)
        self.uncached = LLM(model, seed=0, max_model_len=8192, enable_prefix_caching=False) if with_uncached else None
        self._seeds = iter(range(10**9))

    def states(self, count: int, num_tokens: int) -> list[str]:
        """Fresh ones."""
        tokenizer = self.llm.llm_engine.tokenizer
        return [make_state(tokenizer, num_tokens, next(self._seeds)) for _ in range(count)]

    def decide(self, states: list[str], questions: list[dict[str, Any]]) -> tuple[float, int]:
        """Seconds, and tokens computed."""
        began = time.perf_counter()
        decisions = self.llm.decide(states, questions, use_tqdm=False)
        spent = time.perf_counter() - began
        return spent, sum(each.usage.input_tokens - each.usage.cached_tokens for each in decisions)

    def requests(self, llm: Any, states: list[str], questions: list[dict[str, Any]]) -> float:
        """Seconds of one question after another, each of all clients at once."""
        from vllm import SamplingParams
        from vllm.decisions.plan import DecisionPlan

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
        """Seconds of that many fresh tokens, in prompts of `length`."""
        from vllm import SamplingParams

        tokenizer = self.llm.llm_engine.tokenizer
        lengths = [min(length, num_tokens - start) for start in range(0, num_tokens, length)]
        prompts = [
            {"prompt_token_ids": (tokenizer.encode(make_state(tokenizer, 2 * each, next(self._seeds))) * 2)[:each]}
            for each in lengths
        ]
        params = SamplingParams(temperature=0.0, max_tokens=0, logprob_token_ids=[0])
        began = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began


def measure(ways: Ways, num_questions: int, num_tokens: int, clients: int, rounds: int) -> dict[str, Any]:
    """One row."""
    questions = make_questions(num_questions)
    few = questions[:_MOST_UNCACHED]
    seconds: dict[str, list[float]] = {}
    computed = 0
    for _ in range(rounds):
        spent, computed = ways.decide(ways.states(clients, num_tokens), questions)
        seconds.setdefault("decide", []).append(spent)
        own = ways.requests(ways.llm, ways.states(clients, num_tokens), questions)
        seconds.setdefault("requests", []).append(own)
        seconds.setdefault("prefill", []).append(ways.prefill(computed, num_tokens))
        if ways.uncached is not None:
            own = ways.requests(ways.uncached, ways.states(clients, num_tokens), few)
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
    add_counts(parser, clients=(8, "states that are decided at once"), rounds=(3, ""))
    args = parser.parse_args()
    use_all_cores()
    ways = Ways(args.model, args.uncached)
    measure(ways, 2, 50, 1, 1)  # what is made on first use
    rows = []
    for num_tokens in map(int, args.states.split(",")):
        for num_questions in map(int, args.questions.split(",")):
            rows.append(measure(ways, num_questions, num_tokens, args.clients, args.rounds))
            say(str(rows[-1]))
    print_result(clients=args.clients, rounds=args.rounds, rows=rows)


if __name__ == "__main__":
    main()
