"""Print the logits of chosen token ids for the next tokens of some prompts.

    python examples/get_logits_by_index.py --prompts "The sky is" "2 + 2 =" --indices 216 1183

`--model` takes a folder, .gguf file or hub name (left out: the embedded small model). The values are read the native
way, by `SamplingParams.logprob_token_ids`. A LogitsCapturingSampler listens beside it, and the last line tells whether
both saw the same logits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm import LLM, RequestOutput, SamplingParams
from vllm.v1.sample.logits_capturing_sampler import LogitsCapturingSampler


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--prompts", nargs="+", default=["The capital of France is"], metavar="TEXT")
    parser.add_argument("--indices", nargs="+", type=int, default=[1, 2, 3], metavar="ID", help="token ids to read")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=1, help="tokens to generate, each with its logits")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the values there, too")
    arguments = parser.parse_args()
    if arguments.max_tokens < 1:
        parser.error(f"--max-tokens must be at least 1, got {arguments.max_tokens}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    llm = LLM(arguments.model, tensor_parallel_size=arguments.tensor_parallel_size)
    indices = list(dict.fromkeys(arguments.indices))
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, logprob_token_ids=indices)
    with LogitsCapturingSampler(indices).install(llm) as capture:
        outputs = llm.generate(arguments.prompts, params, use_tqdm=False)

    rows = [row for output in outputs for row in rows_of(output, indices)]
    print_table(rows)
    print(compare(outputs, indices, capture))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def rows_of(output: RequestOutput, indices: list[int]) -> list[dict]:
    """One row a generated position and index, positions first."""
    return [
        {
            "prompt": output.prompt,
            "position": number,
            "token_id": index,
            "token": position[index].decoded_token,
            "logit": position[index].logit,
            "logprob": position[index].logprob,
            "rank": position[index].rank,
        }
        for number, position in enumerate(output.outputs[0].logprobs)
        for index in indices
    ]


def compare(outputs: list[RequestOutput], indices: list[int], capture: LogitsCapturingSampler) -> str:
    """One line on what the readings and the captured logits have in common."""
    largest = 0.0
    for output in outputs:
        read = output.outputs[0].logprobs.select(indices).logits
        captured = capture.get_captured_logits(output.request_id).numpy()
        largest = max(largest, float(abs(read - captured).max(initial=0)))
    verdict = "the same logits" if largest == 0 else f"other logits, by up to {largest:g}"
    return f"LogitsCapturingSampler saw {verdict} ({len(capture.get_captured_logits())} positions)"


def print_table(rows: list[dict]) -> None:
    width = max((len(repr(row["token"])) for row in rows), default=5)
    print(f"{'position':>8} {'id':>7} {'token':<{width}} {'logit':>10} {'logprob':>10} {'rank':>7}  prompt")
    for row in rows:
        print(
            f"{row['position']:8d} {row['token_id']:7d} {row['token']!r:<{width}} {row['logit']:10.4f} "
            f"{row['logprob']:10.4f} {row['rank']:7d}  {row['prompt']!r}"
        )


if __name__ == "__main__":
    main()
