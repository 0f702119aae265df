"""Rank documents by how likely the model finds each relevant to a query: a reranker through the openai SDK.

    vllm serve &
    python examples/online_logprob_token_ids.py

`labels` names texts of one token each, whose probabilities come back with the answer (`logprob_token_ids` takes ids).
A model as small as the embedded one ranks roughly.
"""

from __future__ import annotations

import argparse

import openai

QUERY = "when do trees bloom"
DOCUMENTS = [
    "A cherry pie takes about an hour in the oven.",
    "In most of Europe, cherry trees flower for about two weeks in April.",
    "The train to the coast leaves every hour.",
]
PROMPT = """\
Query: cats
Document: A cat sleeps up to sixteen hours a day.
Relevant: Yes

Query: cats
Document: The parliament met on Monday.
Relevant: No

Query: rain
Document: Take the second street on the left.
Relevant: No

Query: rain
Document: Heavy showers are expected tonight.
Relevant: Yes

Query: {query}
Document: {document}
Relevant:"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--query", default=QUERY)
    parser.add_argument("--documents", nargs="+", default=DOCUMENTS, metavar="TEXT")
    arguments = parser.parse_args()

    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key=arguments.api_key)
    answer = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=[PROMPT.format(query=arguments.query, document=document) for document in arguments.documents],
        max_tokens=0,  # nothing is generated: the probabilities of what would come next are all that is wanted
        # The space belongs to the label: after "Relevant:" the next token is " Yes", not "Yes".
        extra_body={"labels": [" Yes", " No"]},
    )
    yes = str(answer.labels[0]["token_id"])
    ranked = []
    for document, choice in zip(arguments.documents, answer.choices, strict=True):
        (reading,) = choice.readings
        ranked.append((reading["ids"][yes]["probability"], reading["mass"], document))

    print(f"{'P(Yes)':>7} {'mass':>7}   {arguments.query}")
    for probability, mass, document in sorted(ranked, reverse=True):
        print(f"{probability:7.3f} {mass:7.3f}   {document}")
    print("\nP(Yes) is the share of Yes among the two labels, mass the probability of either of them.")


if __name__ == "__main__":
    main()
