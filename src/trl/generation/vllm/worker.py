"""What each of vLLM's workers can do besides generating: receive weights from a trainer over a `WeightChannel`."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from trl.generation.serving.weight_channel import WeightChannel

logger = logging.getLogger(__name__)
_MEETING_S = 300.0  # longest wait for the others of a channel
NamedEntry = Sequence[Any]  # a weight to come: its name, its dtype ("float32") and its shape


class WeightReceiver:
    """Given to vLLM as `worker_extension_cls`: each worker inherits it, and is one receiver of the channel.

    The methods return what went wrong, None where nothing did, and never raise: the executor of several workers (vLLM
    0.32) stops reading at the first that raises, and would take the others' answers for those to its next question.
    """

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any
    reload_weights: Callable[..., None]
    weight_channel: WeightChannel | None = None
    weights_kept: Sequence[str] = ()

    def join_weight_channel(
        self, host: str, port: int, size: int, backend: Literal["gloo", "nccl"], timeout_s: float
    ) -> str | None:
        """Meet the sender and the other workers at `host:port`, where the first worker listens."""
        self.leave_weight_channel()
        try:
            self.weight_channel = WeightChannel.join(
                host, port, self.rank + 1, size,
                backend=backend, device=self.device, timeout_s=timeout_s, serves_store=self.rank == 0,
            )  # fmt: skip
        except ConnectionError as error:
            return str(error)
        return None

    def receive_weights(self, entries: Sequence[NamedEntry], whole: bool) -> str | None:
        """Receive the weights of `entries` and load them; a channel on which that failed is left.

        `whole` says that they are all weights of a checkpoint, named as there.
        """
        if self.weight_channel is None:
            return "no weight channel has been joined. Call init_communicator first."
        arriving = Arriving(self.weight_channel, entries)
        try:
            self.weight_channel.announce()
            if whole:
                self._reload_and_compare(iter(arriving))
            else:
                self.model_runner.get_model().load_weights(iter(arriving))
            arriving.take_rest()
        except Exception as error:
            logger.error("Loading %s failed:\n%s", arriving.at, traceback.format_exc())
            self.leave_weight_channel()
            said = f"loading {arriving.at} failed with {type(error).__name__}: {error}"
            try:
                if whole:
                    self._end_reload()
            except Exception as later:
                said += f"; nor could the model be put together again ({type(later).__name__}: {later}). Start the server anew"
            return said
        return None

    def kept_weights(self) -> list[str]:
        """The parameters of the model that the last whole update did not reach, of which vLLM only says something in its log. None
        for models that do not say what they load, and for quantised ones."""
        return list(self.weights_kept)

    def _reload_and_compare(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        model, self.weights_kept = self.model_runner.get_model(), ()
        names, load, loaded = {name for name, _ in model.named_parameters()}, model.load_weights, []

        def load_and_tell(*given: Any, **named: Any) -> Any:
            found = load(*given, **named)
            loaded.append(found)
            return found

        model.load_weights = load_and_tell
        try:
            self.reload_weights(weights_iterator=weights)
        finally:
            del model.load_weights
        if loaded and loaded[-1] is not None and self.vllm_config.model_config.quantization is None:
            self.weights_kept = sorted(names - loaded[-1])

    def end_with(self, server: int) -> None:
        """End vLLM's engine, and with it this worker, when the process `server` is gone without having done so itself.

        vLLM (0.32) would stay, with its memory, after a server that was killed. To be removed once it does not.
        """
        if not hasattr(os, "pidfd_open"):  # on Linux only
            return
        engine = os.getpid() if os.getppid() == server else os.getppid()
        threading.Thread(target=_end_after, args=(os.pidfd_open(server), engine), daemon=True).start()

    def shared_memory_name(self) -> str | None:
        """What the names of this worker's files in shared memory start with; None for workers without such files.

        Workers on CPUs (vLLM 0.32) leave them behind. To be removed once they do not.
        """
        return os.environ.get("VLLM_DIST_IDENT")

    def leave_weight_channel(self) -> None:
        """Leave the channel, if one was joined."""
        channel, self.weight_channel = self.weight_channel, None
        if channel is not None:
            channel.close()

    def _end_reload(self) -> None:
        """Make the model whole again, though of mixed weights, after a reload that broke off: the next one needs that."""
        from vllm.config import set_current_vllm_config  # pyright: ignore
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore
            finalize_layerwise_reload,
        )

        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)


class WeightSyncWorkerExtension(WeightReceiver):
    """A `WeightReceiver` whose methods raise: `worker_extension_cls` of a vLLM that a program makes for itself."""

    client_rank: int | None = None

    @property
    def communicator(self) -> WeightChannel | None:
        """The channel that was joined, None where none was."""
        return self.weight_channel

    def init_communicator(self, host: str, port: int, world_size: int, client_device_uuid: str) -> None:
        """Meet the client and the other workers, `world_size` processes altogether, at `host:port`.

        Raises: RuntimeError where they do not meet, and where the client trains on this worker's GPU.
        """
        on_gpu = self.device.type == "cuda"
        if on_gpu and str(torch.cuda.get_device_properties(self.device).uuid) == client_device_uuid:
            raise RuntimeError("The client trains on the GPU of this worker. Give each a device of its own.")
        backend = "nccl" if on_gpu else "gloo"
        _raise(self.join_weight_channel(host, port, world_size, backend, _MEETING_S))
        self.client_rank = 0

    def update_named_param(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Receive one weight and load it. Raises: RuntimeError where that fails."""
        _raise(self.receive_weights([(name, dtype.removeprefix("torch."), shape)], whole=False))

    def close_communicator(self) -> None:
        """Leave the channel, if one was joined."""
        self.leave_weight_channel()
        self.client_rank = None


def _raise(failure: str | None) -> None:
    if failure is not None:
        raise RuntimeError(failure)


class Arriving:
    """Name and tensor of each weight of `entries`, as they arrive; `at` says which one it is at."""

    def __init__(self, channel: WeightChannel, entries: Sequence[NamedEntry]) -> None:
        self.at = "no weight"
        self._tensors = self._named(channel, entries)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors

    def take_rest(self) -> None:
        """Take what the model did not ask for: the sender waits until all is taken."""
        for _ in self._tensors:
            pass

    def _named(self, channel: WeightChannel, entries: Sequence[NamedEntry]) -> Iterator[tuple[str, Tensor]]:
        tensors = channel.receive([(getattr(torch, dtype), tuple(shape)) for _, dtype, shape in entries])
        for name, dtype, shape in entries:
            self.at = f"{name} ({dtype}, {list(shape)})"
            yield name, next(tensors)


def _end_after(process: int, engine: int) -> None:
    """Tell `engine` to end once the process of a file descriptor is gone."""
    select.select([process], [], [])
    os.kill(engine, signal.SIGTERM)
