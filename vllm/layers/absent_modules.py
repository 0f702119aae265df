"""All modules of a model that is split by layers, those that other stages have included."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


class Absent(nn.Module):
    """Base of what stands for a module that another stage has.

    Args:
        described: the module on the meta device.
    """

    def __init__(self, described: nn.Module) -> None:
        super().__init__()
        # In a tuple: its parts are not the model's.
        self._described = (described,)

    @property
    def described(self) -> nn.Module:
        """The module as it would be, without memory."""
        return self._described[0]


def all_modules(model: nn.Module) -> Iterator[nn.Module]:
    """A model's modules in their order, with those that other stages have in their places."""
    for module in model.modules():
        if isinstance(module, Absent):
            yield from module.described.modules()
        else:
            yield module
