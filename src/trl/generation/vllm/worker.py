"""Extension of vLLM's workers, which receive weights over a `WeightChannel`."""

import logging
import os
import select
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from trl.generation.serving.weight_channel import WeightChannel

if TYPE_CHECKING:
    from vllm.config import VllmConfig  # pyright: ignore
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # pyright: ignore

logger = logging.getLogger(__name__)
_JOINING_S = 300.0
NamedEntry = tuple[str, str, Sequence[int]]  # name, dtype ("float32") and shape of a weight


class WeightReceiver:
    """vLLM's `worker_extension_cls`: each worker inherits it, and is one receiver of the channel.

    The methods return an error's text and never raise, because the executor of several workers (vLLM 0.32) stops
    reading at the first error, and mistakes the other answers for those of its next call.
    """

    rank: int
    device: torch.device
    model_runner: "GPUModelRunner"
    vllm_config: "VllmConfig"
    reload_weights: Callable[..., None]
    weight_channel: WeightChannel | None = None

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
        """Receive weights (`whole`: all of a checkpoint) and load them; after an error the channel is closed."""
        channel, current = self.weight_channel, "no weight"
        if channel is None:
            return "no weight channel has been joined. Call init_communicator first."

        def arriving() -> Iterator[tuple[str, Tensor]]:
            nonlocal current
            tensors = channel.receive([(getattr(torch, dtype), shape) for _, dtype, shape in entries])
            for name, dtype, shape in entries:
                current = f"{name} ({dtype}, {list(shape)})"
                yield name, next(tensors)

        weights = arriving()
        try:
            channel.announce()
            if whole:
                self.reload_weights(weights_iterator=weights)
            else:
                self.model_runner.get_model().load_weights(weights)
            for _ in weights:  # the sender waits until they are received
                pass
        except Exception as error:
            logger.error("Loading %s failed:\n%s", current, traceback.format_exc())
            self.leave_weight_channel()
            text = f"loading {current} failed with {type(error).__name__}: {error}"
            try:
                if whole:
                    self._end_reload()
            except Exception as later:
                text += f"; restoring the model failed, too ({type(later).__name__}: {later}). Restart the server"
            return text
        return None

    def end_with(self, server: int) -> None:
        """End vLLM's engine, and with it this worker, when the process `server` has ended.

        The engine of vLLM (0.32) survives a server that is killed. To be removed once it does not.
        """
        if not hasattr(os, "pidfd_open"):  # on Linux only
            return
        engine, process = os.getpid() if os.getppid() == server else os.getppid(), os.pidfd_open(server)

        def end() -> None:
            select.select([process], [], [])
            os.kill(engine, signal.SIGTERM)

        threading.Thread(target=end, daemon=True).start()

    def shared_memory_name(self) -> str | None:
        """The prefix of this worker's files in shared memory, which workers on CPUs (vLLM 0.32) do not remove."""
        return os.environ.get("VLLM_DIST_IDENT")

    def leave_weight_channel(self) -> None:
        channel, self.weight_channel = self.weight_channel, None
        if channel is not None:
            channel.close()

    def _end_reload(self) -> None:
        """Finish a reload that failed, with mixed weights, which the next reload needs."""
        from vllm.config import set_current_vllm_config  # pyright: ignore
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # pyright: ignore

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
        """Join the client and the other workers, `world_size` processes, at `host:port`. Raises: RuntimeError."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        _raise(self.join_weight_channel(host, port, world_size, backend, _JOINING_S))
        self.client_rank = 0

    def update_named_param(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Receive one weight and load it. Raises: RuntimeError if that fails."""
        _raise(self.receive_weights([(name, dtype.removeprefix("torch."), shape)], whole=False))

    def close_communicator(self) -> None:
        self.leave_weight_channel()
        self.client_rank = None


def _raise(answer: object) -> None:
    if isinstance(answer, str):
        raise RuntimeError(answer)
