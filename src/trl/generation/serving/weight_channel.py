"""Tensors from one process to others, bit for bit, over a separate process group.

Trainer and vLLM's workers each have their own default group of `torch.distributed`, which is not used.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import TCPStore

from trl.generation.serving.connection import reachable, resolved

BUCKET_BYTES = 64 * 1024**2
_ALIGNED = 16  # bytes, at least the size of any element
_POLL_S = 1e-3
_SENDER = "sender"  # key of rank 0's address
_READY = "ready"  # key of the number of receivers that are ready
_Item = TypeVar("_Item")
Entry = tuple[torch.dtype, Sequence[int]]  # dtype and shape of a tensor


class WeightChannel:
    """Rank 0 sends, ranks 1 and up receive, in the same order, over gloo (CPU tensors) or NCCL (CUDA tensors).

    Tensors are sent in buckets of at most `BUCKET_BYTES`, larger ones alone. After an error the channel cannot be used again.
    """

    def __init__(self, group: Any, store: TCPStore, device: torch.device, timeout_s: float) -> None:
        self._group: Any = group
        self._store: TCPStore | None = store  # the group needs it
        self.device, self.timeout_s = device, timeout_s
        self._rounds = 0  # how often the sender waited for the receivers
        self._closed = Event()

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        rank: int,
        size: int,
        *,
        backend: Literal["gloo", "nccl"],
        device: torch.device | str | int = "cpu",
        timeout_s: float = 240.0,
        serves_store: bool = False,
    ) -> WeightChannel:
        """Join the other ranks at `host:port`; returns after all `size` of them have joined.

        The rank that `serves_store` listens at the address, the others connect to it, in any order. `timeout_s` (seconds) is for
        joining, and later for each bucket.

        Raises: ConnectionError if the address is not available, or the others do not join in time.
        """
        until = time.monotonic() + timeout_s
        place = torch.device(device if backend == "nccl" else "cpu")
        try:
            store = _store(host, port, serves_store, timeout_s)
            group = _group(store, rank, size, backend, _own_address(store, host, port, rank), timeout_s)
            channel = cls(group, store, place, timeout_s)
            left = max(0.1, until - time.monotonic())
            channel._broadcast(torch.zeros(1, dtype=torch.uint8, device=place), left)
        except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
            raise ConnectionError(
                f"The weight channel at {host}:{port} needs all {size} processes within {timeout_s:g} s; rank {rank} could not join it "
                f"over {backend}: {_first_line(error)}. Check that the port is free, the network, and the log of the other side."
            ) from error
        return channel

    def announce(self) -> None:
        """Tell the sender that this rank (1 and up) is ready to receive.

        Raises: ConnectionError if the channel broke.
        """
        if self._store is not None:
            with _as_connection_errors():
                self._store.add(_READY, 1)

    def await_receivers(self) -> None:
        """Wait (rank 0) until all receivers are ready, without a time limit, as they may have other work.

        Raises: ConnectionError if the channel is closed on either side.
        """
        self._rounds += 1
        pause = 0.001
        while True:
            group, store = self._group, self._store
            if group is None or store is None:
                raise ConnectionError("The weight channel was closed before all receivers were ready.")
            with _as_connection_errors():
                if store.add(_READY, 0) >= self._rounds * (group.size() - 1):
                    return
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Send tensors of any device (rank 0).

        Raises: ConnectionError if a receiver has ended or is not in time.
        """
        for bucket in buckets(tensors, lambda tensor: byte_count((tensor.dtype, tensor.shape))):
            self._broadcast(_packed(bucket, self.device))

    def receive(self, entries: Iterable[Entry]) -> Iterator[Tensor]:
        """Receive the tensors of rank 0, given the dtype and shape of each (ranks 1 and up). All of them must be read.

        Raises: ConnectionError if the sender has ended or is not in time.
        """
        for bucket in buckets(entries, byte_count):
            sizes = [byte_count(entry) for entry in bucket]
            buffer = torch.empty(sum(map(_padded, sizes)), dtype=torch.uint8, device=self.device)
            self._broadcast(buffer)
            start = 0
            for (dtype, shape), size in zip(bucket, sizes, strict=True):
                yield buffer[start : start + size].view(dtype).view(tuple(shape))
                start += _padded(size)

    def close(self) -> None:
        """Leave the channel: ranks that wait for this one get an error. Closing twice does nothing."""
        group, self._group, self._store = self._group, None, None
        self._closed.set()
        if group is not None:
            group.abort()

    def _broadcast(self, buffer: Tensor, timeout_s: float | None = None) -> None:
        group, timeout = self._group, timedelta(seconds=self.timeout_s if timeout_s is None else timeout_s)
        if group is None:
            raise ConnectionError("The weight channel is closed. Join a new one.")
        if not buffer.numel():
            return
        try:
            work = group.broadcast(buffer, root=0, timeout=timeout)
            if self.device.type == "cpu":
                self._await(work, timeout.total_seconds())
            done = work.wait(timeout)
        except ConnectionError:
            raise
        except RuntimeError as error:
            self.close()
            raise ConnectionError(
                f"The weight channel broke, or the other side took longer than {timeout.total_seconds():g} s: "
                f"{_first_line(error)}. See the log of the other side for the reason."
            ) from error
        if not done:
            self.close()
            raise ConnectionError(
                f"The weight channel waited longer than {timeout.total_seconds():g} s for the other side. See its log."
            )

    def _await(self, work: Any, timeout_s: float) -> None:
        """Wait for a broadcast over gloo, or until the channel is closed in another thread, which does not end the broadcast."""
        until = time.monotonic() + timeout_s
        while not work.is_completed() and time.monotonic() < until:
            if self._closed.wait(_POLL_S):
                raise ConnectionError("The weight channel was closed during a transfer. Join a new one.")


def buckets(
    items: Iterable[_Item], size: Callable[[_Item], int], *, limit: int = BUCKET_BYTES
) -> Iterator[list[_Item]]:
    """Successive items in lists of at most `limit` bytes each, by `size`; larger items alone.

    The lists depend only on the sizes, so both ends of a channel build the same ones.
    """
    bucket: list[_Item] = []
    filled = 0
    for item in items:
        bytes_here = _padded(size(item))
        if bucket and filled + bytes_here > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += bytes_here
    if bucket:
        yield bucket


def byte_count(entry: Entry) -> int:
    """The size of a tensor in bytes."""
    dtype, shape = entry
    return math.prod(shape) * dtype.itemsize


def _padded(size: int) -> int:
    """`size` rounded up, so that the next tensor of a bucket is aligned for any dtype."""
    return -(-size // _ALIGNED) * _ALIGNED


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The bytes of these tensors in one buffer on `device`."""
    sizes = [byte_count((tensor.dtype, tensor.shape)) for tensor in tensors]
    buffer = torch.zeros(sum(map(_padded, sizes)), dtype=torch.uint8, device=device)
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        buffer[start : start + size].copy_(tensor.detach().reshape(-1).view(torch.uint8))
        start += _padded(size)
    return buffer


def _store(host: str, port: int, serves: bool, timeout_s: float) -> TCPStore:
    """The store at `host:port`; its server listens on that address only."""
    timeout = timedelta(seconds=timeout_s)
    if not serves:
        return TCPStore(reachable(host), port, is_master=False, timeout=timeout, wait_for_workers=False)
    listener = socket.create_server((host, port), family=resolved(host, port)[0])
    return TCPStore(
        reachable(host),
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def _own_address(store: TCPStore, host: str, port: int, rank: int) -> str:
    """This machine's address between sender and store, the only one that gloo listens on."""
    if rank == 0:
        address = _address_towards(reachable(host), port)
        store.set(_SENDER, address)
        return address
    return _address_towards(store.get(_SENDER).decode(), port)


def _address_towards(host: str, port: int) -> str:
    family, target = resolved(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return probe.getsockname()[0]


def _group(store: TCPStore, rank: int, size: int, backend: str, address: str, timeout_s: float) -> Any:
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        # NCCL's watchdog ends the process; the timeouts of buckets are shorter.
        options._timeout = timedelta(seconds=2 * timeout_s + 60)
        return ProcessGroupNCCL(store, rank, size, options)
    from torch.distributed import ProcessGroupGloo

    kind: Any = ProcessGroupGloo  # whose stubs (torch 2.13) lack its options
    gloo = kind._Options()
    gloo._devices = [kind.create_device(hostname=address)]
    gloo._timeout = timedelta(seconds=timeout_s)
    return kind(store, rank, size, gloo)


@contextmanager
def _as_connection_errors() -> Iterator[None]:
    """Turn errors of a store whose other side has ended into ConnectionErrors."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        raise ConnectionError(
            f"The weight channel broke: {_first_line(error)}. See the log of the other side for the reason."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
