"""EAGLE heads: they draft what their formula says by transformers' modules, and change no output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import VOCAB_SIZE, fill_weights, make_architecture
from safetensors.torch import load_file, save_file
from test_mtp import DRAWN, GREEDY, NUM_TOKENS, PROMPTS, assert_as_reference, drafts_of, make_llm, run
from test_state_models import assert_equal_bits
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, DRAFT_VOCAB_SIZE = 32, 50
STREAMS = (2, 1, 3)


class Head:
    """A random head beside a random Llama."""

    def __init__(self, is_third: bool, target: Path, folder: Path) -> None:
        self.is_third = is_third
        self.model = make_architecture("llama", target, attention_bias=False, mlp_bias=False)
        one = make_architecture(
            "llama", folder, seed=5, num_hidden_layers=1, attention_bias=False, mlp_bias=False, vocab_size=VOCAB_SIZE
        )
        self.one, self.layer = one.model, one.model.layers[0]
        self.fc = nn.Linear((3 if is_third else 2) * SIZE, SIZE, bias=not is_third)
        self.hidden_norm, self.input_norm = (type(one.model.norm)(SIZE, eps=1e-6) for _ in range(2))
        self.head = nn.Linear(SIZE, DRAFT_VOCAB_SIZE, bias=False)
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB_SIZE].sort()[0]
        attention = self.layer.self_attn
        if is_third:
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(attention, name, nn.Linear(2 * SIZE, getattr(attention, name).out_features, bias=False))
        for index, module in enumerate((self.fc, self.hidden_norm, self.input_norm, self.head, attention)):
            fill_weights(module, 20 + index)
        stored = load_file(folder / "model.safetensors")
        tensors = {"fc.weight": self.fc.weight, "embed_tokens.weight": stored["model.embed_tokens.weight"]}
        prefix = "midlayer." if is_third else "layers.0."
        tensors |= {prefix + name: value for name, value in self.layer.state_dict().items()}
        options = {"architectures": ["LlamaForCausalLMEagle"]}
        if is_third:
            tensors |= {
                "midlayer.hidden_norm.weight": self.hidden_norm.weight,
                "midlayer.input_layernorm.weight": self.input_norm.weight,
                "norm.weight": stored["model.norm.weight"],
                "lm_head.weight": self.head.weight,
                "d2t": self.ids - torch.arange(DRAFT_VOCAB_SIZE),
                "t2d": torch.isin(torch.arange(VOCAB_SIZE), self.ids),
            }
            options |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB_SIZE}
            options |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(STREAMS)}}
        else:
            tensors |= {"fc.bias": self.fc.bias}
            del tensors["layers.0.input_layernorm.weight"]
        save_file({name: value.detach().clone() for name, value in tensors.items()}, folder / "model.safetensors")
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | options))

    @torch.no_grad()
    def logits(self, text: Sequence[int], num_tokens: int) -> tuple[list[int], list[Tensor]]:
        """As Reference.logits."""
        found, all_logits = list(text), []
        ids = torch.tensor([list(text)[:-1]])
        out = self.model.model(ids, output_hidden_states=True)
        kept = torch.cat([out.hidden_states[index][0] for index in STREAMS], -1)
        inputs = self.fc(kept) if self.is_third else out.last_hidden_state[0]
        for _ in range(num_tokens):
            hidden = self._layer(found[1:], inputs)
            all_logits.append(self._head(hidden[-1]))
            found.append(int(all_logits[-1].argmax()))
            inputs = torch.cat((inputs, hidden[-1:]))
        return found[len(text) :], all_logits

    def _layer(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        embedding = self.one.embed_tokens if self.is_third else self.model.get_input_embeddings()
        embedded = embedding(torch.tensor(tokens))
        if self.is_third:
            stream, x = hidden, torch.cat((self.input_norm(embedded), self.hidden_norm(hidden)), -1)
        else:
            stream = x = self.fc(torch.cat((embedded, hidden), -1))
        count = len(tokens)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotary = self.one.rotary_emb(x[None], torch.arange(count)[None])
        attended, *_ = self.layer.self_attn(
            hidden_states=x[None], position_embeddings=rotary, attention_mask=mask, past_key_values=None
        )
        stream = stream + attended[0]
        return stream + self.layer.mlp(self.layer.post_attention_layernorm(stream))

    def _head(self, hidden: Tensor) -> Tensor:
        if not self.is_third:
            return self.model.lm_head(hidden)
        logits = torch.full((VOCAB_SIZE,), -torch.inf)
        logits[self.ids] = self.head(self.one.norm(hidden))
        return logits


def drafting(target: Path, head: Path, method: str, **fields: Any) -> Any:
    settings = {"method": method, "model": str(head), "num_speculative_tokens": NUM_TOKENS}
    settings["num_speculative_tokens_per_batch_size"] = [(1, 1024, NUM_TOKENS)]
    return make_llm(target, speculative_config=settings, **fields)


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path, Head]:
    target, folder = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    return request.param, target, folder, Head(request.param == "eagle3", target, folder)


@pytest.mark.parametrize(
    "fields", [{}, {"enforce_eager": True, "max_num_batched_tokens": 24}], ids=["usual", "chunked"]
)
def test_drafts_follow_the_formula(made: tuple[str, Path, Path, Head], fields: dict[str, Any]) -> None:
    method, target, folder, head = made
    llm, plain = drafting(target, folder, method, **fields), make_llm(target, **fields)
    drafts = drafts_of(llm)
    for params in (GREEDY, DRAWN):
        assert_equal_bits(run(llm, params), run(plain, params))
    assert_as_reference(drafts[::5], head)


def test_two_ranks(made: tuple[str, Path, Path, Head]) -> None:
    method, target, folder, _ = made
    llms = drafting(target, folder, method), drafting(target, folder, method, tensor_parallel_size=2)
    tokens = [[each.outputs[0].token_ids for each in run(llm, GREEDY, PROMPTS)] for llm in llms]
    assert tokens[0] == tokens[1]
    counts = [llm.llm_engine.engine_core.stats() for llm in llms]
    assert counts[0]["num_draft_tokens"] == counts[1]["num_draft_tokens"]


def test_what_is_no_head_is_refused(made: tuple[str, Path, Path, Head], tmp_path: Path) -> None:
    method, target, folder, _ = made
    other = "eagle" if method == "eagle3" else "eagle3"
    with pytest.raises(ValueError, match="is no head of EAGLE"):
        drafting(target, folder, other)
    make_architecture("llama", tmp_path, hidden_size=64)
    with pytest.raises(ValueError, match="has hidden_size=32, and the target 64: it is another model's head"):
        drafting(tmp_path, folder, method)
