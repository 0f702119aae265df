"""Any encoder of transformers, and decoders that pool whole texts: its own module, called for sequences of equal length
at a time, so that none is padded and no result depends on what shares the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm.config.checkpoint.auto_config import describe, load_auto_config
from vllm.config.checkpoint.config import HFConfig
from vllm.config.checkpoint.sentence_transformers import sentence_length
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.adapted.products import ModuleLinear, adapter_places
from vllm.layers.linear_method import UNQUANTIZED
from vllm.layers.weight_update import UpdatableModel, WeightUpdater

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
# Encoders that transformers does not list as models of masked words.
_OTHERS = frozenset({"splinter"})
# These are no decoders, whatever architectures such as BertLMHeadModel say.
_NAMED_AS_CAUSAL = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "xlm", "flaubert"})
# Decoders whose layers keep a state that our cache does not hold: they pool whole texts, which need none. By the class
# that runs an architecture.
_WHOLE = {"Lfm2Model": "Lfm2Model", "ColBERTLfm2Model": "Lfm2Model"}
# These cannot be run right here, for the reason beside each.
_REFUSED = {
    "funnel": "its first token has a type of its own",
    "xlnet": "its first token has a type of its own",
    "reformer": "its results depend on chance",
    "perceiver": "it reads bytes",
}


def find_encoder(raw: dict[str, Any], classifies: bool = True) -> str | None:
    """The name of the class of transformers that runs an encoder: of its hidden states, or, with `classifies`, of its
    classes where the architecture has them. None: config.json means no encoder that transformers has."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kind, names = str(raw.get("model_type")), raw.get("architectures") or ()
    name = names[0] if names else ""
    if name in _WHOLE:
        return _WHOLE[name]
    # A class of somebody's own may be anything.
    if name and not hasattr(transformers, name):
        return None
    is_known = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind in _OTHERS or name.endswith("EncoderModel")
    # BERT's authors have named models of masked words so, too.
    is_causal = name.endswith(("ForCausalLM", "LMHeadModel"))
    if not is_known or (is_causal and (kind not in _NAMED_AS_CAUSAL or raw.get("is_decoder"))):
        return None
    kept = (*_CLASSIFIERS, "EncoderModel") if classifies else ("EncoderModel",)
    if name.endswith(kept):
        return name
    found = auto.MODEL_MAPPING_NAMES.get(kind)
    return found if isinstance(found, str) else None


def load_encoder_config(raw: dict[str, Any], folder: Path, trust_remote_code: bool) -> HFConfig:
    """The configuration of a model that `find_encoder` finds.

    Raises:
        ValueError: transformers cannot use it, or it cannot run right here.
    """
    auto = load_auto_config(raw, folder, trust_remote_code)
    if problem := _problem(raw, auto):
        raise ValueError(f"{folder.name}/config.json: {find_encoder(raw)} is not supported: {problem}")
    with torch.device("meta"):
        model = _build(raw, auto)
    embeddings = model.get_input_embeddings()
    heads = getattr(auto, "num_attention_heads", None) or 1
    geometry = {
        "hidden_size": auto.hidden_size,
        "vocab_size": embeddings.weight.shape[0],
        "num_hidden_layers": auto.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": max(auto.hidden_size // heads, 1),
    }
    if not isinstance(getattr(auto, "max_position_embeddings", None), int):
        auto.max_position_embeddings = getattr(auto, "n_positions", None) or sentence_length(folder)
    config = describe(auto, geometry, raw, {})
    return replace(config, max_context_len=min(config.max_context_len, _num_positions(model)), is_encoder=True)


def _problem(raw: dict[str, Any], auto: Any) -> str | None:
    kind, name = str(raw.get("model_type")), str(find_encoder(raw))
    if getattr(auto, "is_encoder_decoder", False) and not name.endswith("EncoderModel"):
        return "it is an encoder-decoder, whose states are the decoder's"
    if getattr(auto, "attention_type", None) == "block_sparse":
        return (
            "attention_type='block_sparse' chooses tokens by chance: "
            "hf_overrides={'attention_type': 'original_full'} lets them see all"
        )
    return _REFUSED.get(kind)


def _num_positions(model: nn.Module) -> int:
    """Rows of the table of positions that are for tokens: in some models they begin after the padding's."""
    tables = [each for name, each in model.named_modules() if name.endswith("position_embeddings")]
    # I-BERT's are no nn.Embedding.
    paddings = [getattr(each, "padding_idx", None) for each in tables]
    sizes = [
        len(each.weight) - (0 if padding is None else padding + 1)
        for each, padding in zip(tables, paddings, strict=True)
        if isinstance(getattr(each, "weight", None), Tensor)
    ]
    return min(sizes, default=2**31)


def _build(raw: dict[str, Any], auto: Any) -> Any:
    import transformers

    name = find_encoder(raw)
    assert name is not None
    try:
        return getattr(transformers, name)(auto)
    except Exception as error:  # its code may do anything
        raise ValueError(f"{name} cannot be built as config.json says ({type(error).__name__}: {error})") from error


class TransformersEncoder(UpdatableModel):
    """A module of transformers; its results are hidden states, or logits, of sequences or of tokens.

    Attributes:
        adapter_of: of a sequence's place in a step, the row of its adapter.
        use_adapter: before those whose first one has a place: the linears take its adapter.
    """

    adapter_of: Callable[[int], int] | None = None
    use_adapter: Callable[[int], None] | None = None

    def __init__(self, config: ModelConfig, device: torch.device, takes_adapters: bool = False) -> None:
        """
        Raises:
            ValueError: several ranks, quantised weights, or some that the module does not have.
        """
        super().__init__()
        import transformers

        raw = config.hf_config.raw
        if (ranks := get_tp_group().world_size) > 1:
            raise ValueError(
                f"tensor_parallel_size={ranks} is not supported for {', '.join(config.hf_config.architectures)}, which "
                "runs as transformers' module, whole on one device: data_parallel_size starts a replica on each"
            )
        if config.quantization is not None:
            raise ValueError(
                f"quantization={config.quantization!r} is not supported for {config.architecture}, which runs as "
                "transformers' module with plain weights: use the unquantised model, without quantization"
            )
        name = find_encoder(raw, "embed" not in config.convert)
        assert name is not None
        auto, dtype = load_auto_config(raw, Path(config.path), config.trust_remote_code), getattr(torch, config.dtype)
        if config.load_format == "dummy":
            torch.manual_seed(config.seed)
            model = getattr(transformers, name)(auto).to(dtype)
        else:
            model, info = getattr(transformers, name).from_pretrained(
                config.path, config=auto, dtype=dtype, output_loading_info=True
            )
            if missing := sorted(each for each in info["missing_keys"] if "pooler." not in each):
                raise ValueError(f"{Path(config.path).name} lacks weights: {', '.join(missing[:5])}")
        self.model = model.to(device).eval()
        linears: list[Any] = [each for each in model.modules() if type(each) is nn.Linear] if takes_adapters else []
        for each in linears:
            each.__class__, each.adapters, each.was_called = ModuleLinear, None, False
        self.weight_updater = WeightUpdater(self, UNQUANTIZED)
        self._gives_tokens = not name.endswith(_CLASSIFIERS[0])
        # XLM takes words' embeddings for those of types.
        has_types = getattr(auto, "type_vocab_size", 0)
        self._takes_types = bool(has_types) and "token_type_ids" in inspect.signature(model.forward).parameters
        self._try_out(name, device)
        for each in linears:
            if not each.was_called:
                # The module reads the weight itself.
                each.__class__ = nn.Linear
        self.adapter_places = adapter_places(self) if takes_adapters else {}

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        types: Tensor,
        lengths: Sequence[int],
        attended: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Each sequence's hidden states [L, H], or logits: [L, labels] or [1, labels]. See EncoderForPooling."""
        results: list[Tensor] = []
        start = place = 0
        adapters = [0 if self.adapter_of is None else self.adapter_of(index) for index in range(len(lengths))]
        for (length, seen, _), same in groupby(zip(lengths, attended or lengths, adapters, strict=True)):
            count = len(list(same))
            if self.use_adapter is not None:
                self.use_adapter(place)
            place += count
            rows = slice(start, start + count * length)
            inputs: dict[str, Tensor] = {"input_ids": ids[rows].view(count, length)}
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            inputs["attention_mask"][:, seen:] = 0
            if self._takes_types:
                inputs["token_type_ids"] = types[rows].view(count, length)
            results += self._run(inputs)
            start = rows.stop
        return results

    @torch.inference_mode()
    def _try_out(self, name: str, device: torch.device) -> None:
        """ValueError: the module wants more than token ids, or gives something else than a row for each."""
        ids, length = torch.zeros(3, dtype=torch.long, device=device), 3
        try:
            (result,) = self(ids, ids, ids, [length])
        except Exception as error:  # its code may do anything
            raise ValueError(f"{name} cannot run on token ids alone ({type(error).__name__}: {error})") from error
        wanted = length if self._gives_tokens else 1
        if result.ndim != 2 or len(result) != wanted:
            raise ValueError(f"{name} is not supported: it gives {list(result.shape)} for {length} tokens")

    def classify(self, rows: Tensor) -> Tensor:
        """The module's own logits, which its results are."""
        return rows.float()

    def _run(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        output = self.model(**inputs)[0]
        return list(output if self._gives_tokens else output.unsqueeze(1))
