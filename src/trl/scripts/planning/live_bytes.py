"""Bytes of the tensors that are alive: counted over real tensors, or over tensors without numbers."""

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from trl.scripts.planning.state import tensor_bytes

_SMALL = 1024  # entries of a new tensor that has numbers
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)


class Bytes(NamedTuple):
    """Of a phase at its peak: gradients, and all others; for a plan, what is neither weight nor gradient."""

    gradients: float
    others: float


class LiveBytes(TorchDispatchMode):
    """A block that counts the storages of the tensors made in it, and of those that `add` is given, while they live.

    `now` is their sum; `peaks` has the largest in each `phase`, gradients of the `trained` weights apart. Buffers
    inside of a kernel are not seen.
    """

    def __init__(self, trained: Sequence[nn.Parameter] = ()) -> None:
        super().__init__()
        self.trained, self.now, self.phase = trained, 0, ""
        self.peaks: dict[str, Bytes] = {}
        self._storages: set[int] = set()

    def begin(self, phase: str) -> None:
        """Begin a phase; one that was there before goes on."""
        self.phase = phase
        self._measure()

    def _measure(self) -> None:
        if self.phase not in self.peaks or sum(self.peaks[self.phase]) < self.now:
            gradients = tensor_bytes(weight.grad for weight in self.trained if weight.grad is not None)
            self.peaks[self.phase] = Bytes(gradients, self.now - gradients)

    def add(self, tensors: Iterable[object]) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            holder: Any = tensor
            if tensor.layout is torch.strided:
                holder = tensor.untyped_storage()
                key, size = holder._cdata, holder.nbytes()
            else:  # oneDNN's
                key, size = id(tensor), tensor.numel() * tensor.itemsize
            if key not in self._storages:
                self._storages.add(key)
                weakref.finalize(holder, self._drop, key, size)
                self.now += size
                self._measure()

    def _drop(self, key: int, size: int) -> None:
        self._storages.remove(key)
        self.now -= size

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        return result


class WithoutNumbers(TorchDispatchMode):
    """A block in which large floating tensors have no memory: shapes and dtypes are those of a run on a CPU.

    `take` must see the models first. Small and integer tensors are real (token ids, segments): a layout can be read
    from them. A number that is read from a tensor without numbers is 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def take(self, model: nn.Module, core: PreTrainedModel) -> None:
        """Give the tensors of a model on the meta device the form that this block computes with; tied stay tied."""
        with self._fake:
            model.to_empty(device="cpu")
            core.tie_weights()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors:
            with self._fake:
                made = func(*args, **kwargs)
            large = isinstance(made, Tensor) and made.is_floating_point() and made.numel() > _SMALL
            return made if large else func(*args, **kwargs)
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if tensors[0].is_floating_point() else 1
        if func in _INDEXED:  # a mask with numbers says how many entries it chooses
            places = (x.nonzero().unbind(1) if type(x) is Tensor and x.dtype == torch.bool else (x,) for x in args[1])
            args = (args[0], [*chain.from_iterable(places)], *args[2:])
        with self._fake:
            if func is torch.ops.aten._grouped_mm.default:  # its shapes are known for bfloat16 only (torch 2.13)
                halves = [part.to(torch.bfloat16) for part in args[:2]]
                return func(*halves, *args[2:], **kwargs).to(args[0].dtype)
            return func(*args, **kwargs)
