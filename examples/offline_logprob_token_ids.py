"""Read how likely chosen next tokens are: a Yes/No question and one with the options A to D.

Run it with `python examples/offline_logprob_token_ids.py`; `--model` takes a folder, .gguf file or hub name
(left out: the embedded small model). A model that small leans to one answer whatever is asked: what it shows
here is not knowledge, but its exact inclination.
"""

from __future__ import annotations

import argparse

from vllm import LLM, RequestOutput, SamplingParams

YES_NO = """\
Question: Is the sun a star?
Answer: Yes
Question: Is the moon made of cheese?
Answer: No
Question: Is Paris the capital of France?
Answer:"""

A_TO_D = """\
Question: Which animal barks?
A. cat
B. cow
C. dog
D. duck
Answer: C

Question: Which of these is a fruit?
A. banana
B. chair
C. hammer
D. river
Answer:"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    llm = LLM(parser.parse_args().model)
    tokenizer = llm.get_tokenizer()

    questions = [(YES_NO, [" Yes", " No"]), (A_TO_D, [" A", " B", " C", " D"])]
    prompts, params = [], []
    for prompt, labels in questions:
        # The space belongs to the label: after "Answer:" the model's next token is " Yes", not "Yes".
        encoded = [tokenizer.encode(label, add_special_tokens=False) for label in labels]
        # A label of several tokens has no single reading, and its first token alone would mislead.
        assert all(len(ids) == 1 for ids in encoded), f"a label is not one token: {encoded}"
        label_ids = [ids[0] for ids in encoded]
        prompts.append(prompt)
        # Either field works without the other; together they give the true top three, and the labels.
        params.append(SamplingParams(max_tokens=1, temperature=0, logprobs=3, logprob_token_ids=label_ids))

    outputs = llm.generate(prompts, params, use_tqdm=False)
    for (prompt, _), own, output in zip(questions, params, outputs, strict=True):
        show(prompt, own.logprob_token_ids or [], output)


def show(prompt: str, label_ids: list[int], output: RequestOutput) -> None:
    """Print the readings of the one generated position."""
    # {token_id: Logprob}: the sampled token first, then the top three, then the labels; each token once.
    position = output.outputs[0].logprobs[0]
    among_labels = position.softmax(label_ids)
    print(prompt)
    print(f"\n  {'token':<10} {'logprob':>9} {'rank':>6} {'logit':>8}   P among the labels")
    for token_id, reading in position.items():
        share = f"{among_labels[token_id]:.3f}" if token_id in among_labels else ""
        token = repr(reading.decoded_token)
        print(f"  {token:<10} {reading.logprob:9.4f} {reading.rank:6d} {reading.logit:8.3f}   {share}")
    print(f"  label mass: {position.mass(label_ids):.4f}, the probability of any of the labels\n")


if __name__ == "__main__":
    main()
