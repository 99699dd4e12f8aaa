"""Extension of vLLM's workers, which receive weights over a `WeightChannel`."""

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
_JOINING_S = 300.0
NamedEntry = Sequence[Any]  # name, dtype ("float32") and shape of a weight


class WeightReceiver:
    """vLLM's `worker_extension_cls`: each worker inherits it, and is one receiver of the channel.

    The methods return an error's text or None and never raise, because the executor of several workers (vLLM 0.32) stops reading
    at the first error, and mistakes the other answers for those of its next call.
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
        """Join the channel at `host:port`, where the first worker listens."""
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
        """Receive the weights of `entries` and load them; after an error the channel is closed.

        `whole`: they are all weights of a checkpoint, with its names.
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
            text = f"loading {arriving.at} failed with {type(error).__name__}: {error}"
            try:
                if whole:
                    self._end_reload()
            except Exception as later:
                text += (
                    f"; restoring the model failed, too ({type(later).__name__}: {later}). Restart the server"
                )
            return text
        return None

    def kept_weights(self) -> list[str]:
        """The model's parameters that the last whole update did not load; none for quantised models, and for models that do not
        return what they load."""
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
        """End vLLM's engine, and with it this worker, when the process `server` has ended.

        The engine of vLLM (0.32) survives a server that is killed. To be removed once it does not.
        """
        if not hasattr(os, "pidfd_open"):  # on Linux only
            return
        engine = os.getpid() if os.getppid() == server else os.getppid()
        threading.Thread(target=_end_after, args=(os.pidfd_open(server), engine), daemon=True).start()

    def shared_memory_name(self) -> str | None:
        """The prefix of this worker's files in shared memory; None without such files.

        Workers on CPUs (vLLM 0.32) do not remove them. To be removed once they do.
        """
        return os.environ.get("VLLM_DIST_IDENT")

    def leave_weight_channel(self) -> None:
        """Leave the channel, if it is open."""
        channel, self.weight_channel = self.weight_channel, None
        if channel is not None:
            channel.close()

    def _end_reload(self) -> None:
        """Finish a reload that failed, with mixed weights, which the next reload needs."""
        from vllm.config import set_current_vllm_config  # pyright: ignore
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore
            finalize_layerwise_reload,
        )

        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)


class WeightSyncWorkerExtension(WeightReceiver):
    """A `WeightReceiver` whose methods raise, as `worker_extension_cls` of a program's own vLLM."""

    client_rank: int | None = None

    @property
    def communicator(self) -> WeightChannel | None:
        """The channel, None if it was not joined."""
        return self.weight_channel

    def init_communicator(self, host: str, port: int, world_size: int, client_device_uuid: str) -> None:
        """Join the client and the other workers, `world_size` processes altogether, at `host:port`.

        Raises: RuntimeError if that fails, and if the client trains on this worker's GPU.
        """
        on_gpu = self.device.type == "cuda"
        if on_gpu and str(torch.cuda.get_device_properties(self.device).uuid) == client_device_uuid:
            raise RuntimeError("The client trains on the GPU of this worker. Give each a device of its own.")
        backend = "nccl" if on_gpu else "gloo"
        _raise(self.join_weight_channel(host, port, world_size, backend, _JOINING_S))
        self.client_rank = 0

    def update_named_param(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Receive one weight and load it. Raises: RuntimeError if that fails."""
        _raise(self.receive_weights([(name, dtype.removeprefix("torch."), shape)], whole=False))

    def close_communicator(self) -> None:
        """Leave the channel, if it is open."""
        self.leave_weight_channel()
        self.client_rank = None


def _raise(failure: str | None) -> None:
    if failure is not None:
        raise RuntimeError(failure)


class Arriving:
    """Names and tensors of the weights of `entries` as they arrive; `at` describes the current one."""

    def __init__(self, channel: WeightChannel, entries: Sequence[NamedEntry]) -> None:
        self.at = "no weight"
        self._tensors = self._named(channel, entries)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors

    def take_rest(self) -> None:
        """Receive what the model did not read, because the sender waits for it."""
        for _ in self._tensors:
            pass

    def _named(self, channel: WeightChannel, entries: Sequence[NamedEntry]) -> Iterator[tuple[str, Tensor]]:
        tensors = channel.receive([(getattr(torch, dtype), tuple(shape)) for _, dtype, shape in entries])
        for name, dtype, shape in entries:
            self.at = f"{name} ({dtype}, {list(shape)})"
            yield name, next(tensors)


def _end_after(process: int, engine: int) -> None:
    """End `engine` after the process of a file descriptor has ended."""
    select.select([process], [], [])
    os.kill(engine, signal.SIGTERM)
