"""ray.data.llm on two machines, an engine on each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ray_cluster import environment, join
from two_machines import two_machines

from vllm import LLM, SamplingParams

NUM_ROWS = 24

# A node has room for one engine's placement group beside the tasks that carry rows.
SCRIPT = """
import json, sys
import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

ray.init(log_to_driver=False)
fields = {"temperature": 0.0, "max_tokens": 1, "logprob_token_ids": [5, 6]}

process = build_processor(
    vLLMEngineProcessorConfig(
        model_source=sys.argv[1],
        engine_kwargs={"max_model_len": 256, "dtype": "float32", "max_num_seqs": 2},
        concurrency=(2, 2),
        batch_size=2,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        placement_group_config={"bundles": [{"CPU": 2}]},
    ),
    preprocess=lambda row: {"tokenized_prompt": [5, 6, 7 + row["id"]], "sampling_params": fields, "id": row["id"]},
)
rows = process(ray.data.from_items([{"id": i} for i in range(int(sys.argv[2]))], override_num_blocks=12)).take_all()
# Its public kin asks a dashboard.
actors = [actor for actor in ray._private.state.actors().values() if "vLLM" in str(actor)]
nodes = {actor["Address"]["NodeID"] for actor in actors}
read = {row["id"]: {t: row["logprobs"][0][t]["logprob"] for t in (5, 6)} for row in rows}
print("read", json.dumps([read, len(nodes)]), flush=True)
"""


def test_an_engine_on_each(tiny_model: Path, llm: LLM) -> None:
    pytest.importorskip("jsonref")
    with two_machines() as machines:
        variables = environment(machines)
        join(machines, 0, 3, variables)
        join(machines, 1, 3, variables)
        command = machines.command(0, sys.executable, "-c", SCRIPT, str(tiny_model), str(NUM_ROWS))
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    said = [line for line in result.stdout.splitlines() if line.startswith("read ")]
    assert said, result.stdout[-2000:] + result.stderr[-3000:]
    read, num_nodes = json.loads(said[0].removeprefix("read "))
    assert num_nodes == 2, result.stdout[-3000:]
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[5, 6])
    prompts = [{"prompt_token_ids": [5, 6, 7 + place]} for place in range(NUM_ROWS)]
    for place, own in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        position = own.outputs[0].logprobs[0]
        expected = {str(token): pytest.approx(position[token].logprob, abs=1e-4) for token in (5, 6)}
        assert read[str(place)] == expected
