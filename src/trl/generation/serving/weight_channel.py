"""Tensors from one process to others, bit for bit, over a separate process group.

Trainer and vLLM's workers each have their own default group of `torch.distributed`, which is not used.
"""

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore

from trl.generation.serving.connection import Json, reachable, resolved

_POLL_S = 1e-3
_SENDER = "sender"  # key of rank 0's address
_READY = "ready"  # key of the number of receivers that are ready
Entry = tuple[torch.dtype, Sequence[int]]  # dtype and shape of a tensor


class WeightChannel:
    """Rank 0 sends, ranks 1 and up receive, in one order, over gloo (CPU) or NCCL (CUDA), until an error."""

    def __init__(self, group: ProcessGroup, store: TCPStore, device: torch.device, timeout_s: float) -> None:
        self._group: ProcessGroup | None = group
        self._store: TCPStore | None = store  # the group needs it
        self.device, self.timeout_s = device, timeout_s
        self._rounds = 0  # how often the sender waited for the receivers
        self._closed = Event()

    @classmethod
    def join(
        cls, host: str, port: int, rank: int, size: int, *, backend: Literal["gloo", "nccl"],
        device: torch.device | str | int = "cpu", timeout_s: float = 240.0, serves_store: bool = False,
    ) -> "WeightChannel":  # fmt: skip
        """Join the other ranks at `host:port`; returns after all `size` of them have joined.

        The rank that `serves_store` listens at the address, the others connect to it, in any order. `timeout_s`
        (seconds) is for joining, and later for each tensor. Raises: ConnectionError.
        """
        until = time.monotonic() + timeout_s
        place = torch.device(device if backend == "nccl" else "cpu")
        try:
            store = _store(host, port, serves_store, timeout_s)
            group = _group(store, rank, size, backend, _own_address(store, host, port, rank), timeout_s)
            channel = cls(group, store, place, timeout_s)
            left = max(0.1, until - time.monotonic())
            channel._broadcast(torch.zeros(1, device=place), left)
        except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
            needs = f"needs {size} processes within {timeout_s:g} s; rank {rank}: {_first_line(error)}"
            raise ConnectionError(f"The weight channel at {host}:{port} {needs}.") from error
        return channel

    def announce(self) -> None:
        """Tell the sender that this rank (1 and up) is ready to receive. Raises: ConnectionError."""
        with self._breaking():
            self._opened()[1].add(_READY, 1)

    def await_receivers(self) -> None:
        """Wait (rank 0) without limit until all receivers are ready. Raises: ConnectionError if it is closed."""
        self._rounds += 1
        pause = 0.001
        while True:
            group, store = self._opened()
            with self._breaking():
                if store.add(_READY, 0) >= self._rounds * (group.size() - 1):
                    return
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Send tensors of any device (rank 0). Raises: ConnectionError if a receiver has ended or is not in time."""
        for tensor in tensors:
            self._broadcast(tensor.detach().to(self.device).contiguous())

    def receive(self, entries: Iterable[Entry]) -> Iterator[Tensor]:
        """Receive rank 0's tensors, given the dtype and shape of each; all must be read. Raises: ConnectionError."""
        for dtype, shape in entries:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
            self._broadcast(tensor)
            yield tensor

    def close(self) -> None:
        """Leave the channel: ranks that wait for this one get an error. Closing twice does nothing."""
        group, self._group, self._store = self._group, None, None
        self._closed.set()
        if group is not None:
            group.abort()

    def _opened(self) -> tuple[ProcessGroup, TCPStore]:
        group, store = self._group, self._store
        if group is None or store is None:
            raise ConnectionError("The weight channel is closed. Join a new one.")
        return group, store

    def _broadcast(self, tensor: Tensor, timeout_s: float | None = None) -> None:
        group, seconds = self._opened()[0], self.timeout_s if timeout_s is None else timeout_s
        if not tensor.numel():
            return
        with self._breaking(f", or the other side took longer than {seconds:g} s"):
            timeout = timedelta(seconds=seconds)
            work = group.broadcast(tensor.view(-1).view(torch.uint8), root=0, timeout=timeout)
            until = time.monotonic() + seconds
            # Closing the channel in another thread does not end a broadcast over gloo.
            while self.device.type == "cpu" and not work.is_completed() and time.monotonic() < until:
                if self._closed.wait(_POLL_S):
                    raise RuntimeError("it was closed during a transfer")
            if not work.wait(timeout):
                raise RuntimeError("no answer")

    @contextmanager
    def _breaking(self, otherwise: str = "") -> Iterator[None]:
        """Close the channel after an error of torch, and raise a ConnectionError."""
        try:
            yield
        except RuntimeError as error:  # torch's DistError is one
            self.close()
            text = f"The weight channel broke{otherwise}: {_first_line(error)}. See the log of the other side."
            raise ConnectionError(text) from error


def _store(host: str, port: int, serves: bool, timeout_s: float) -> TCPStore:
    """The store at `host:port`; its server listens on that address only."""
    options: Json = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    if not serves:
        return TCPStore(reachable(host), port, is_master=False, **options)
    listener = socket.create_server((host, port), family=resolved(host, port)[0])
    port = listener.getsockname()[1]
    options["master_listen_fd"] = listener.detach()  # the store closes it
    return TCPStore(reachable(host), port, is_master=True, **options)


def _own_address(store: TCPStore, host: str, port: int, rank: int) -> str:
    """This machine's address between sender and store, the only one that gloo listens on."""
    family, target = resolved(reachable(host) if rank == 0 else store.get(_SENDER).decode(), port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        address = probe.getsockname()[0]
    if rank == 0:
        store.set(_SENDER, address)
    return address


def _group(store: TCPStore, rank: int, size: int, backend: str, address: str, timeout_s: float) -> Any:
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        # NCCL's watchdog ends the process; the timeouts of tensors are shorter.
        options._timeout = timedelta(seconds=2 * timeout_s + 60)
        return ProcessGroupNCCL(store, rank, size, options)
    from torch.distributed import ProcessGroupGloo

    kind: Any = ProcessGroupGloo  # whose stubs (torch 2.13) lack its options
    gloo = kind._Options()
    gloo._devices = [kind.create_device(hostname=address)]
    gloo._timeout = timedelta(seconds=timeout_s)
    return kind(store, rank, size, gloo)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
