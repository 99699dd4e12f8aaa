"""Activations kept in host memory between forward and backward, copied on a side stream.

Storages are moved, not tensors: views and tensors that are saved twice share one copy. A storage that is written to
between two saves counts as two (by autograd's version counter).
"""

import logging
import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

logger = logging.getLogger(__name__)

_FETCHED_AHEAD = 2  # storages that are copied back before they are needed


class _Entry:
    """A storage: its copy on the host, its bytes on the device while they are there, the event of a copy under way."""

    def __init__(self, device_bytes: Tensor, previous: "weakref.ref[_Entry] | None"):
        # While this reference lives, the address that identifies the storage is not given to another one.
        self.identity = StorageWeakRef(device_bytes.untyped_storage())
        self.device = device_bytes.device
        self.device_bytes: Tensor | None = device_bytes
        self.host: Tensor
        self.copied: torch.Event | None = None
        self.previous = previous

    def wait(self) -> None:
        """Order the device's current stream after the copy under way."""
        if self.copied is not None:
            torch.get_device_module(self.device).current_stream().wait_event(self.copied)
            self.copied = None


class _View(NamedTuple):
    """What autograd saves instead of an offloaded tensor."""

    entry: _Entry
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class NoOpManager(saved_tensors_hooks):
    """Saves tensors where they are: disables an enclosing `OffloadActivations`."""

    def __init__(self) -> None:
        # Detached: a hook that returns the tensor it was given makes a reference cycle with its graph.
        super().__init__(Tensor.detach, lambda saved: saved)


class OffloadActivations(saved_tensors_hooks):
    """Context in which saved activations are kept in host memory until their backward.

    Parameters (call `update_model_params`, or use `get_act_offloading_ctx_manager`), tensors under `min_offload_size`
    bytes and tensors on the CPU stay where they are. With `use_streams`, at most `max_fwd_stash_size` storages are
    being copied to the host at once, and the next storages of the backward are copied back while it computes; without,
    each copy is synchronous. `use_pin_memory` page-locks the host copies, which asynchronous copies need.
    """

    def __init__(
        self, use_pin_memory: bool = True, use_streams: bool = True, min_offload_size: int = 1024,
        max_fwd_stash_size: int = 5,
    ) -> None:  # fmt: skip
        if max_fwd_stash_size < 1:
            raise ValueError(f"max_fwd_stash_size must be >= 1, got {max_fwd_stash_size}.")
        self.use_pin_memory = use_pin_memory and torch.accelerator.is_available()
        self.use_streams = use_streams
        self.min_offload_size, self.max_fwd_stash_size = min_offload_size, max_fwd_stash_size
        self.stay_on: tuple[str, ...] = ("cpu", "meta")
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._parameters: set[int] = set()
        self._known: weakref.WeakValueDictionary[tuple[int, int], _Entry] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Entry] | None = None
        self._leaving: deque[_Entry] = deque()
        self._ahead: deque[_Entry] = deque()
        self._streams: dict[torch.device, torch.Stream] = {}
        super().__init__(self._pack, self._unpack)

    def update_model_params(self, model: torch.nn.Module) -> None:
        """Remember the storages of `model`'s parameters; repeated whenever the context is entered."""
        self._model = weakref.ref(model)
        plain = [parameter for parameter in model.parameters() if type(parameter.data) is Tensor]
        self._parameters = {parameter.untyped_storage()._cdata for parameter in plain}

    def __enter__(self) -> None:
        model = self._model() if self._model is not None else None
        if model is not None:
            self.update_model_params(model)
        super().__enter__()

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_complex()
        if (
            not is_plain
            or tensor.device.type in self.stay_on
            or tensor.numel() * tensor.element_size() < self.min_offload_size
            or isinstance(tensor._base, torch.nn.Parameter)
            or tensor.untyped_storage()._cdata in self._parameters
        ):
            return tensor.detach()
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        entry = self._known.get(key)
        if entry is None:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._known[key] = entry = _Entry(whole, self._last)
            self._last = weakref.ref(entry)
            self._send(entry)
        return _View(entry, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _send(self, entry: _Entry) -> None:
        assert entry.device_bytes is not None
        entry.host = torch.empty(entry.device_bytes.shape, dtype=torch.uint8, pin_memory=self.use_pin_memory)
        self._copy(entry, entry.host, entry.device_bytes)
        if not self.use_streams:
            entry.device_bytes = None
            return
        self._leaving.append(entry)
        while len(self._leaving) > self.max_fwd_stash_size:  # its memory's next use is ordered after the copy
            gone = self._leaving.popleft()
            gone.wait()
            gone.device_bytes = None

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        entry = saved.entry
        while self._leaving:  # the last ones of the forward are still on the device
            self._leaving.popleft().wait()
        self._fetch(entry)
        entry.wait()
        if self.use_streams:
            self._fetch_ahead(entry)
        assert entry.device_bytes is not None
        empty = torch.empty(0, dtype=saved.dtype, device=entry.device)
        return empty.set_(entry.device_bytes.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _fetch(self, entry: _Entry) -> None:
        if entry.device_bytes is None:
            entry.device_bytes = torch.empty(entry.host.shape, dtype=torch.uint8, device=entry.device)
            self._copy(entry, entry.device_bytes, entry.host)

    def _fetch_ahead(self, entry: _Entry) -> None:
        """Copy back what was saved before `entry`, and hold it until the copy is ordered before the compute."""
        for _ in range(_FETCHED_AHEAD):
            before = entry.previous() if entry.previous is not None else None
            if before is None:
                return
            if before.device_bytes is None:
                self._fetch(before)
                self._ahead.append(before)
            entry = before
        while len(self._ahead) > _FETCHED_AHEAD:
            self._ahead.popleft().wait()

    def _copy(self, entry: _Entry, target: Tensor, source: Tensor) -> None:
        """Copy, with `use_streams` on a side stream after the work of the current one."""
        if not self.use_streams:
            target.copy_(source)
            return
        module = torch.get_device_module(entry.device)
        if entry.device not in self._streams:
            self._streams[entry.device] = module.Stream()
        side = self._streams[entry.device]
        side.wait_stream(module.current_stream())
        with module.stream(side):
            target.copy_(source, non_blocking=True)
        entry.copied = side.record_event()


def get_act_offloading_ctx_manager(
    model: torch.nn.Module, use_pin_memory: bool = True, use_streams: bool = True, min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5, warn_if_no_head: bool = True,
) -> OffloadActivations:  # fmt: skip
    """An `OffloadActivations` for `model` with these options, except for its output head, whose backward comes first.

    A model without a known head is offloaded whole, with a warning if `warn_if_no_head`.
    """
    context = OffloadActivations(use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size)
    context.update_model_params(model)
    while isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    embeddings = getattr(model, "get_output_embeddings", lambda: None)()
    heads = (embeddings, *(getattr(model, name, None) for name in ("lm_head", "score", "classifier", "output")))
    head = next((head for head in heads if isinstance(head, torch.nn.Module)), None)
    if head is not None:
        blocks: list[NoOpManager] = []

        def enter(*_: object) -> None:
            blocks.append(NoOpManager())
            blocks[-1].__enter__()

        head.register_forward_pre_hook(enter)
        head.register_forward_hook(lambda *_: blocks.pop().__exit__(), always_call=True)
    elif warn_if_no_head:
        logger.warning("%s has no known output head: all activations are offloaded.", type(model).__name__)
    return context
