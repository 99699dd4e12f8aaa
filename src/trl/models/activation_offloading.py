"""Activations held in host memory between forward and backward, copied on a stream of their own beside the compute.

The unit that moves is a storage, not a tensor: views and tensors that were saved twice share one copy each way. A storage
that was written to between two saves counts as two, told apart by autograd's version counter.
"""

import logging
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

logger = logging.getLogger(__name__)

_FETCHED_AHEAD = 2  # storages brought back before they are asked for


class _Entry:
    """One storage: its copy on the host, its bytes on the device while they are there, and the copy under way."""

    def __init__(self, device_bytes: Tensor, previous: "weakref.ref[_Entry] | None"):
        # While this reference lives, the address that identifies the storage is not given to another one.
        self.identity = StorageWeakRef(device_bytes.untyped_storage())
        self.device = device_bytes.device
        self.device_bytes: Tensor | None = device_bytes
        self.host: Tensor
        self.departure: Any = None  # event: the copy to the host is done
        self.arrival: Any = None  # event: the copy back is done
        self.previous = previous


class _View(NamedTuple):
    """What autograd keeps in the place of a tensor that was sent away."""

    entry: _Entry
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class NoOpManager(saved_tensors_hooks):
    """Saves tensors where they are: switches an enclosing `OffloadActivations` off for a block."""

    def __init__(self) -> None:
        # Detached: a hook that gives back the very tensor it was given makes a reference cycle with its graph.
        super().__init__(Tensor.detach, lambda saved: saved)


class OffloadActivations(saved_tensors_hooks):
    """Context in which saved activations wait for their backward in host memory.

    Parameters (call `update_model_params`, or use `get_act_offloading_ctx_manager`), tensors under `min_offload_size`
    bytes and tensors that are on the CPU already stay where they are. With `use_streams`, at most
    `max_fwd_stash_size` storages are on their way at once, and the next storages that the backward will need come
    back while it computes; without, each copy waits for its end. `use_pin_memory` page-locks the host copies, which
    asynchronous copies need.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 5,
    ) -> None:
        if max_fwd_stash_size < 1:
            raise ValueError(f"max_fwd_stash_size must be >= 1, got {max_fwd_stash_size}.")
        self.use_pin_memory = use_pin_memory and torch.accelerator.is_available()
        self.use_streams = use_streams
        self.min_offload_size = min_offload_size
        self.max_fwd_stash_size = max_fwd_stash_size
        self.stay_on: tuple[str, ...] = ("cpu", "meta")
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._parameters: set[int] = set()
        self._known: weakref.WeakValueDictionary[tuple[int, int], _Entry] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Entry] | None = None
        self._leaving: deque[_Entry] = deque()
        self._ahead: deque[_Entry] = deque()
        self._streams: dict[torch.device, Any] = {}
        super().__init__(self._pack, self._unpack)

    def update_model_params(self, model: torch.nn.Module) -> None:
        """Remember which storages are `model`'s parameters; entering the context looks again."""
        self._model = weakref.ref(model)
        plain = [parameter for parameter in model.parameters() if type(parameter.data) is Tensor]
        self._parameters = {parameter.untyped_storage()._cdata for parameter in plain}

    def __enter__(self) -> None:
        model = self._model() if self._model is not None else None
        if model is not None:
            self.update_model_params(model)
        super().__enter__()

    # --- forward: device to host ---

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        if not self._moves(tensor):
            return tensor.detach()
        return _View(
            self._entry(tensor), tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    def _moves(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_complex()
        if not plain or tensor.device.type in self.stay_on:
            return False
        if tensor.numel() * tensor.element_size() < self.min_offload_size:
            return False
        of_parameter = isinstance(tensor._base, torch.nn.Parameter)
        return not of_parameter and tensor.untyped_storage()._cdata not in self._parameters

    def _entry(self, tensor: Tensor) -> _Entry:
        """The entry of the tensor's storage as it is now; a new one is sent on its way."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        entry = self._known.get(key)
        if entry is None:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            entry = _Entry(whole, self._last)
            self._known[key] = entry
            self._last = weakref.ref(entry)
            self._send(entry)
        return entry

    def _send(self, entry: _Entry) -> None:
        device_bytes = entry.device_bytes
        assert device_bytes is not None
        entry.host = torch.empty(device_bytes.shape, dtype=torch.uint8, pin_memory=self.use_pin_memory)
        if not self.use_streams:
            entry.host.copy_(device_bytes)
            entry.device_bytes = None
            return
        entry.departure = self._copy_aside(entry.host, device_bytes, entry.device)
        self._leaving.append(entry)
        while len(self._leaving) > self.max_fwd_stash_size:  # its next use is ordered after the copy
            gone = self._leaving.popleft()
            self._current_stream(gone.device).wait_event(gone.departure)
            gone.departure = gone.device_bytes = None

    # --- backward: host to device ---

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        storage = self._arrived(saved.entry).untyped_storage()
        empty = torch.empty(0, dtype=saved.dtype, device=saved.entry.device)
        return empty.set_(storage, saved.offset, saved.size, saved.stride)

    def _arrived(self, entry: _Entry) -> Tensor:
        """The entry's bytes on the device, ready for the current stream; its predecessors are called back."""
        while self._leaving:  # the last ones of the forward are still here: they need no way back
            here = self._leaving.popleft()
            self._current_stream(here.device).wait_event(here.departure)
            here.departure = None
        self._fetch(entry)
        if entry.arrival is not None:
            self._current_stream(entry.device).wait_event(entry.arrival)
            entry.arrival = None
        if self.use_streams:
            self._fetch_ahead(entry)
        assert entry.device_bytes is not None
        return entry.device_bytes

    def _fetch(self, entry: _Entry) -> None:
        if entry.device_bytes is not None:
            return
        entry.device_bytes = torch.empty(entry.host.shape, dtype=torch.uint8, device=entry.device)
        if self.use_streams:
            entry.arrival = self._copy_aside(entry.device_bytes, entry.host, entry.device)
        else:
            entry.device_bytes.copy_(entry.host)

    def _fetch_ahead(self, entry: _Entry) -> None:
        """Call back what was saved before `entry`. It is held here until its copy is ordered before the compute."""
        for _ in range(_FETCHED_AHEAD):
            before = entry.previous() if entry.previous is not None else None
            if before is None:
                return
            if before.device_bytes is None:
                self._fetch(before)
                self._ahead.append(before)
            entry = before
        while len(self._ahead) > _FETCHED_AHEAD:
            unused = self._ahead.popleft()
            if unused.arrival is not None:
                self._current_stream(unused.device).wait_event(unused.arrival)

    # --- streams ---

    def _copy_aside(self, target: Tensor, source: Tensor, device: torch.device) -> Any:
        """Copy on the device's side stream, after all that its current stream was given; returns the copy's event."""
        module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream()
        side = self._streams[device]
        side.wait_stream(module.current_stream())
        with module.stream(side):
            target.copy_(source, non_blocking=True)
        return side.record_event()

    def _current_stream(self, device: torch.device) -> Any:
        return torch.get_device_module(device).current_stream()


def get_act_offloading_ctx_manager(
    model: torch.nn.Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5,
    warn_if_no_head: bool = True,
) -> OffloadActivations:
    """An `OffloadActivations` for `model`, whose output head saves in place: its backward comes first anyway.

    The options are those of `OffloadActivations`. A model without a head that can be found is offloaded whole, with a
    warning unless `warn_if_no_head` is false.
    """
    context = OffloadActivations(use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size)
    context.update_model_params(model)
    head = _output_head(model)
    if head is not None:
        _save_in_place(head)
    elif warn_if_no_head:
        logger.warning(
            "%s has no output head that is known, so its activations are offloaded too: slower, same gradients.",
            type(model).__name__,
        )
    return context


def _output_head(model: torch.nn.Module) -> torch.nn.Module | None:
    while isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    heads = (find(), *(getattr(model, name, None) for name in ("lm_head", "score", "classifier", "output")))
    return next((head for head in heads if isinstance(head, torch.nn.Module)), None)


def _save_in_place(module: torch.nn.Module) -> None:
    blocks: list[NoOpManager] = []

    def enter(*_: Any) -> None:
        blocks.append(NoOpManager())
        blocks[-1].__enter__()

    def leave(*_: Any) -> None:
        blocks.pop().__exit__()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
