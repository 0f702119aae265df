"""Any causal language model of transformers: its own module, with our attention, linears, head and readings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm import envs
from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.config.checkpoint.auto_config import load_auto_config
from vllm.config.checkpoint.text_part import MARK, text_tensor_name
from vllm.distributed.communicator import PeerLostError
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.input_rows import InputRows
from vllm.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.layers.weight_update import UpdatableModel
from vllm.logger import init_logger
from vllm.models.checkpoint_names import gates_are_halves
from vllm.models.transformers.build import build, refusal
from vllm.models.transformers.eager import EagerLayer, eager_attention
from vllm.models.transformers.experts import StackedExperts, is_experts
from vllm.models.transformers.layers import (
    Head,
    PagedLayer,
    PagedLayers,
    Step,
    TokenEmbedding,
    make_linear,
    make_mlp,
    make_norm,
    parallel_style,
)
from vllm.models.transformers.weights import CheckpointNames
from vllm.quantization.stored import Value

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger(__name__)

# A token alone and among others: bfloat16's rounding differs by some percent after many layers, another token's
# influence by much more.
_SAME = 0.1


class TransformersForCausalLM(UpdatableModel):
    """A module of transformers, its children registered under its own names. Methods: see CausalLM."""

    lm_head: Head

    def __init__(self, model_config: ModelConfig) -> None:
        """ValueError: the model does what cannot be done here, or tensor_parallel_size does not suit it."""
        super().__init__()
        config, folder = model_config.hf_config, Path(model_config.path)
        auto = load_auto_config(config.raw, folder, model_config.trust_remote_code)
        hf, self.plan = build(auto, config.raw, folder, model_config.trust_remote_code)
        self._names = CheckpointNames(hf, gates_are_halves(config.raw))
        self._is_text_part = MARK in config.raw
        self._is_eager = model_config.rounding != "vllm"
        self._is_autocast = model_config.rounding == "autocast"
        persistent = set(hf.state_dict())
        # The tied weights and biases that are held twice, by their sources' names.
        self._copied: dict[str, str] = {}
        self._step, self._like = Step(), torch.empty(0)
        try:
            head = self._replace(hf)
        except ValueError as error:
            raise refusal(type(hf), error) from error
        _materialize(hf)
        # In tuples: their modules are registered as this one's children.
        self._hf, self._base = (hf,), (hf.get_submodule(self.plan.base),)
        for name, child in hf.named_children():
            self.add_module(name, child)
        for name, parameter in hf.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        # Not as a module: it is one already, under the name that it has there.
        self.__dict__["lm_head"] = head
        self._kept = {name: buffer for name, buffer in hf.named_buffers() if name in persistent}
        # Buffers get an update's values once all else of it is there.
        self._new_buffers: list[tuple[Tensor, Tensor]] = []
        self._is_unchecked = False
        # In place of the base's results while logits are computed.
        self._given: list[Any] = []
        _answer(self._base[0], self._given)
        self.input_rows = _input_rows(hf, self._base[0])

    def _replace(self, hf: Any) -> Head:
        """Put our modules in the places of transformers'; returns the head."""
        plan: dict[str, str] = dict(getattr(hf, "tp_plan", None) or {})
        if get_tp_group().world_size > 1 and not plan:
            logger.warning("%s has no plan for tensor parallelism: every rank holds all of it", type(hf).__name__)
        head_module, embedding_module = hf.get_output_embeddings(), hf.get_input_embeddings()
        names = {module: name for name, module in hf.named_modules()}
        self._head_name: str = names[head_module]
        embedding: VocabParallelEmbedding | None = None
        if type(embedding_module) is nn.Embedding:
            embedding = TokenEmbedding(embedding_module.num_embeddings, embedding_module.embedding_dim)
            _set(hf, names[embedding_module], embedding)
        head = self._make_head(hf, names[head_module], head_module, names[embedding_module], embedding)
        fused: list[str] = []
        for module, name in names.items():
            own: nn.Module | None = None
            if name.startswith(tuple(fused)):
                continue
            if not self._is_eager and (mlp := make_mlp(module, name, plan)) is not None:
                own = mlp
                fused.append(f"{name}.")
            elif type(module) is nn.Linear and module is not head_module:
                own = make_linear(module, name.rpartition(".")[2], parallel_style(name, plan))
            elif self._is_eager:
                continue
            elif is_experts(module):
                if envs.batch_invariant():
                    raise ValueError(
                        "VLLM_BATCH_INVARIANT=1 cannot be kept: PyTorch chooses its tokens' experts by products whose "
                        "order of sums follows the shape of the batch"
                    )
                own = StackedExperts(module) if torch.get_default_device().type == "cpu" else None
            elif module not in (embedding_module, head_module):
                own = make_norm(module)
            if own is not None:
                _set(hf, name, own)
        base = hf.get_submodule(self.plan.base)
        for call in self.plan.calls:
            caller: Any = base.get_submodule(call.name)
            # As a submodule it is found by whoever sets the backend.
            if not hasattr(caller, "paged_layers"):
                caller.add_module("paged_layers", PagedLayers(self._step))
            if self._is_eager:
                eager_attention(caller)
            caller.paged_layers.append((EagerLayer if self._is_eager else PagedLayer)(call, self._step))
        # Caches are in the order of modules.
        for index, layer in enumerate(each for each in hf.modules() if isinstance(each, PagedLayer)):
            layer.index = index
        return head

    def _make_head(
        self, hf: Any, name: str, linear: nn.Linear, embedding_name: str, embedding: VocabParallelEmbedding | None
    ) -> Head:
        tied = getattr(hf, "all_tied_weights_keys", None) or {}
        source = tied.get(f"{name}.weight")
        is_tied = source is not None and source == f"{embedding_name}.weight"
        head = Head(linear, embedding if is_tied else None)
        head.is_rounded = self._is_eager
        if source is not None and head.tied_to is None:
            self._copied[source] = f"{name}.weight"
        if (source := tied.get(f"{name}.bias")) is not None:
            self._copied[source] = f"{name}.bias"
        _set(hf, name, head)
        return head

    def convert_checkpoint(
        self, tensors: Iterable[tuple[str, Value]], is_update: bool = False
    ) -> Iterator[tuple[str, Value]]:
        """The tensors of a checkpoint as this model's slots take them; buffers are filled here. Those of an update may
        lack some; its buffers are filled in `load_weights`."""
        if self._is_text_part:
            named = ((text_tensor_name(name), tensor) for name, tensor in tensors)
            tensors = ((name, tensor) for name, tensor in named if name is not None)
        convert = self._names.convert_update if is_update else self._names.convert
        for name, tensor in convert(tensors):
            if name in self._kept and isinstance(tensor, Tensor):
                buffer = self._kept[name]
                if tensor.shape != buffer.shape:
                    shapes = f"{tuple(buffer.shape)}, got {tuple(tensor.shape)}"
                    raise ValueError(f"load_weights: {name} must have shape {shapes}")
                if is_update:
                    self._new_buffers.append((buffer, tensor))
                else:
                    buffer.copy_(tensor)
                continue
            yield name, tensor
            if name in self._copied:
                yield self._copied[name], tensor

    def load_weights(self, weights: Iterable[tuple[str, Value]]) -> set[str]:
        """As WeightUpdater.update; the names that are returned are the module's."""
        self._new_buffers.clear()
        with self._names.all_or_nothing():
            taken = super().load_weights(self.convert_checkpoint(weights, is_update=True))
        for buffer, tensor in self._new_buffers:
            buffer.copy_(tensor)
        self.weight_updater.version += len(self._new_buffers)
        self.weight_updater.lacking = self._names.lacking
        return taken

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        attn: AttentionMetadata | None,
        logits_rows: Tensor | None = None,
    ) -> Tensor:
        """See CausalLM.forward."""
        if self._is_unchecked:
            self._is_unchecked = False
            self._check_tokens()
        self._step.begin(kv_caches, attn)
        with self._rounding():
            output = self._base[0](input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        hidden = output[0][0]
        return hidden if logits_rows is None else hidden.index_select(0, logits_rows)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, H] -> this rank's logits, float32 [L, V_rank], those of `lm_head.vocab_range`."""
        with self._rounding():
            logits = self.lm_head(hidden) if self.lm_head.is_final else self._finish(hidden)
        return logits.float()

    def _rounding(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._like.device.type, torch.bfloat16) if self._is_autocast else nullcontext()

    def drop_head(self) -> str:
        """See CausalLM.drop_head. ValueError: there are other layers after the hidden states."""
        parts = (f"{self.plan.base}.", f"{self._head_name}.")
        if others := [name for name, _ in self._hf[0].named_parameters() if not name.startswith(parts)]:
            name = type(self._hf[0]).__name__
            raise ValueError(f"{name} cannot be served as a pooling model: {others[0]} follows its hidden states")
        _set(self, self._head_name, nn.Identity())
        self.lm_head, self._copied = None, {}  # type: ignore[assignment]
        return f"{self._head_name}."

    def _finish(self, hidden: Tensor) -> Tensor:
        """Logits [L, V_rank] of the base's hidden states [L, H]."""
        self._given.append(hidden[None])
        try:
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
            return self._hf[0](input_ids=ids, use_cache=False).logits[0]
        finally:
            self._given.clear()

    @torch.inference_mode()
    def check_loaded(self) -> None:
        """Find out whether the head's results are the model's, and check that tokens meet in attention alone.

        Raises:
            ValueError: a token's hidden state depends on what shares its step, or its position is not used.
        """
        if get_tp_group().world_size == 1:
            self._check_tokens()
        else:
            # Other ranks may not have loaded theirs: their first step does it.
            self._is_unchecked = True
        if self.lm_head is not None and self.plan.hidden_size == self.lm_head._hidden_size:
            self.lm_head.is_final = _is_identity(self, self.lm_head._like.new_zeros(3, self.plan.hidden_size))

    def _check_tokens(self) -> None:
        device = self._like.device
        ids = torch.tensor([1, 3, 2], device=device) % self.plan.vocab_size
        positions = torch.tensor([4, 1, 7], device=device)
        try:
            together = self(ids, positions, [], None)
            alone = torch.cat([self(ids[row : row + 1], positions[row : row + 1], [], None) for row in range(3)])
        except PeerLostError:
            raise
        except Exception as error:  # its code may do anything
            raise refusal(type(self._hf[0]), f"a trial run failed ({type(error).__name__}: {error})") from error
        difference = (together.float() - alone.float()).norm(dim=-1)
        if not (difference <= _SAME * alone.float().norm(dim=-1) + 1e-6).all():
            reason = "its tokens depend on each other outside of attention, or on their places in the step"
            raise refusal(type(self._hf[0]), reason)


def _set(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(root.get_submodule(parent), own, module)


def _materialize(model: nn.Module) -> None:
    """Memory for the parameters that are still on the meta device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                own = torch.empty(parameter.shape, dtype=parameter.dtype)
                module.register_parameter(name, nn.Parameter(own, requires_grad=False))


def _input_rows(hf: Any, base: Any) -> InputRows | None:
    """The rows in place of the embeddings; None where layers take more of a token than that."""
    if hasattr(base, "get_per_layer_inputs"):
        return None
    rows = InputRows()
    hf.get_input_embeddings().register_forward_hook(lambda module, ids, embeddings: rows(embeddings))
    return rows


def _answer(base: Any, given: list[Tensor]) -> None:
    """Let `base` return the hidden states in `given`, if there are any, instead of computing them."""
    compute = base.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _Hidden(given) if given else compute(*args, **kwargs)

    base.forward = forward


class _Hidden(tuple[Tensor]):
    """A base's result: hidden states, and None for all else that it may be asked for."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def _is_identity(model: TransformersForCausalLM, hidden: Tensor) -> bool:
    """Whether the model does nothing to its base's hidden states before the head, nor to the head's logits."""
    head = model.lm_head
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(hidden.shape, generator=generator).to(hidden)
    logits = 100 * torch.randn(hidden.shape[0], len(head.vocab_range), generator=generator).to(hidden.device)
    taken: list[Tensor] = []

    def pretend(x: Tensor) -> Tensor:
        taken.append(x.reshape(-1, x.shape[-1]))
        return logits.view(*x.shape[:-1], -1)

    compute, head.forward = head.forward, pretend  # type: ignore[method-assign,assignment]
    try:
        result = model._finish(hidden)
    finally:
        head.forward = compute  # type: ignore[method-assign]
    return bool(taken) and taken[0].equal(hidden) and result.shape == logits.shape and result.equal(logits)
