"""Trainers' sides of the built-in transports: over gloo, and by files in the memory that processes share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from queue import Queue
from threading import Thread
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Self

from vllm.distributed.trainer_group import TrainerGroup, send_tensors
from vllm.upstream.weights.transfer import TrainerWeightTransferEngine, VLLMWeightSyncClient, WeightSource, host_copy
from vllm.upstream.weights.transports import IPCTrainerInitInfo, NCCLTrainerInitInfo, trainer_init

SHARED_MEMORY = "/dev/shm"


class GroupTrainer(TrainerWeightTransferEngine[NCCLTrainerInitInfo]):
    """Sends to a group of the trainer's first rank and all workers."""

    init_info_cls: ClassVar[type[Any]] = NCCLTrainerInitInfo
    _group: TrainerGroup | None = None
    _bucket_bytes: int

    @classmethod
    def trainer_init(
        cls, init_info: NCCLTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """See the base. Workers come while the client's call waits, so the two run at the same time."""
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._bucket_bytes = init_info.packed_buffer_size_bytes
        if init_info.is_sender:
            told = {**asdict(init_info), "rank_offset": 1}
            del told["rank"]
            engine._group = _while_told(
                lambda: client.init_weight_transfer_engine(told), lambda: trainer_init(init_info)
            )
        return engine

    def send_weights(self, weight_version: str | None = None) -> None:
        """Send all of the source's weights; the engines take them at once, all or none."""
        source = _source(self.source)
        if self._group is None:
            _gather_only(source)
            return
        metas, group = source.metadata, self._group
        announced = {
            "names": [meta.name for meta in metas],
            "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in metas],
            "shapes": [list(meta.shape) for meta in metas],
        }
        tensors = (tensor for _, tensor in source.iter_full())
        self.client.start_weight_update()
        _while_told(
            lambda: self.client.update_weights(announced),
            lambda: send_tensors(group, tensors, bucket_bytes=self._bucket_bytes),
        )
        self.client.finish_weight_update(weight_version)

    def shutdown(self) -> None:
        self._group = None


class SharedMemoryTrainer(TrainerWeightTransferEngine[IPCTrainerInitInfo]):
    """Writes safetensors files that workers of this machine read."""

    init_info_cls: ClassVar[type[Any]] = IPCTrainerInitInfo
    _bucket_bytes: int

    @classmethod
    def trainer_init(
        cls, init_info: IPCTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """See the base."""
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._bucket_bytes = init_info.packed_buffer_size_bytes
        if init_info.is_sender:
            client.init_weight_transfer_engine({})
        return engine

    def send_weights(self, weight_version: str | None = None) -> None:
        """Send all of the source's weights, a bucket a file; the engines take them at once, all or none."""
        from safetensors.torch import save_file

        source = _source(self.source)
        if not self.is_sender:
            _gather_only(source)
            return
        self.client.start_weight_update()
        folder = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None
        for bucket in _buckets(source.iter_full(), self._bucket_bytes):
            with tempfile.NamedTemporaryFile(suffix=".safetensors", dir=folder) as file:
                save_file(bucket, file.name)
                self.client.update_weights({"path": file.name})
        self.client.finish_weight_update(weight_version)


def _source(source: WeightSource | None) -> WeightSource:
    if source is None:
        raise ValueError("send_weights needs a source: trainer_init(..., source=ModuleSource(model))")
    return source


def _gather_only(source: WeightSource) -> None:
    """Take part in what the sending rank's iteration gathers."""
    for _ in source.iter_full():
        pass


def _buckets(pairs: Iterator[tuple[str, Tensor]], num_bytes: int) -> Iterator[dict[str, Tensor]]:
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in pairs:
        if bucket and size + tensor.numel() * tensor.element_size() > num_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = host_copy(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket


def _while_told(tell: Callable[[], None], work: Callable[[], Any]) -> Any:
    """The result of `work`, done while engines are told and do their part. Where they refuse, it is left waiting."""
    results: Queue[tuple[Any, BaseException | None]] = Queue()

    def run() -> None:
        try:
            results.put((work(), None))
        except BaseException as error:
            results.put((None, error))

    Thread(target=run, daemon=True).start()
    try:
        tell()
    except Exception:
        if not results.empty() and (error := results.get()[1]) is not None:
            raise error from None
        raise
    result, error = results.get()
    if error is not None:
        raise error
    return result
