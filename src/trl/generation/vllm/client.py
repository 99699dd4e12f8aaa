"""The client of `trl vllm-serve`: completions over HTTP, weights over a `WeightChannel`."""

import atexit
import base64
import io
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trl.generation.main_process import process_count
from trl.generation.serving.connection import HangUp, Json, ServerConnection, ServerLost
from trl.generation.serving.weight_channel import WeightChannel
from trl.generation.vllm.weights import WeightParts
from trl.reporting.deadlines import start

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

CHANNEL_TIMEOUT_S = 240.0  # for joining, and for each bucket of weights


class VLLMClient:
    """Client of a server that was started with `trl vllm-serve`. It does not need vLLM.

    `base_url` (such as http://10.0.0.7:8000) takes precedence over `host` and `server_port`; the host 0.0.0.0 means
    this machine. `group_port` is the port of the weight channel on the server's machine, `connection_timeout` the time
    to wait for the server in seconds. `token` is its secret (None: TRL_VLLM_SERVER_TOKEN, or a local server's file).
    Raises: ConnectionError if no server answers in time.

    Example:
        >>> from trl.extras.vllm_client import VLLMClient
        >>> client = VLLMClient()  # doctest: +SKIP
        >>> client.init_communicator(device="cuda:0")  # doctest: +SKIP
        >>> client.update_model_params(model)  # doctest: +SKIP
        >>> client.generate(["The sky is"], n=2, max_tokens=8)["completion_ids"]  # doctest: +SKIP
    """

    def __init__(
        self, base_url: str | None = None, host: str = "0.0.0.0", server_port: int = 8000, group_port: int = 51216,
        connection_timeout: float = 0.0, *, token: str | None = None,
    ) -> None:  # fmt: skip
        address = base_url or f"http://{f'[{host}]' if host.count(':') > 1 else host}:{server_port}"
        self._http = ServerConnection(address, token)
        self.base_url, self.host, self.server_port = self._http.base_url, self._http.host, self._http.port
        self.group_port = group_port
        self._channel: WeightChannel | None = None
        self.channel_name: str | None = None  # of the weights that completions must come from, given by the server
        self._joining: Future[WeightChannel] | None = None
        self.check_server(connection_timeout)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait `total_timeout` seconds for an answer, tried every `retry_interval`. Raises: ConnectionError."""
        until, is_waiting = time.monotonic() + total_timeout, False
        while True:
            try:
                self._http.get("/health/", timeout_s=max(5.0, retry_interval))
                return
            except ServerLost as error:
                left = until - time.monotonic()
                if left <= 0:
                    fault = f"No vLLM server answered at {self.base_url} within {total_timeout:g} s"
                    reason = error.__cause__ or error
                    raise ConnectionError(f"{fault} ({reason}). Start `trl vllm-serve`.") from error
                if not is_waiting:
                    logger.warning("Waiting up to %.0f s for the vLLM server at %s.", left, self.base_url)
                    is_waiting = True
                time.sleep(min(retry_interval, left))

    def get_world_size(self) -> int:
        """The number of vLLM's workers."""
        return int(self._http.get("/get_world_size/")["world_size"])

    def model(self) -> Json:
        """`model`, `dtype`, `max_model_len` (tokens), `vocab_size` and `device` of the server."""
        return self._http.get("/model/")

    def complete(self, requests: Sequence[Mapping[str, object]], *, hang_up: HangUp | None = None) -> list[Json]:
        """A completion of each request, with `ids`, `logprobs` and `finish_reason`.

        A request has `prompt_ids` and `sampling` (arguments of vLLM's `SamplingParams`). The server decodes them
        together with those of other calls. `hang_up()` of another thread ends the call, with ServerLost. Raises:
        ServerLost if the server lost the weights, for example by a restart.
        """
        connected = None if hang_up is None else hang_up.connected
        body = {"requests": [dict(request) for request in requests]}
        answer = self._http.post("/complete/", body, connected=connected)
        self._check_channel(answer)
        return answer["completions"]

    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], images: list | None = None, n: int = 1,
        repetition_penalty: float = 1.0, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1,
        min_p: float = 0.0, max_tokens: int = 16, truncate_prompt_tokens: int | None = None,
        guided_decoding_regex: str | None = None, generation_kwargs: Json | None = None,
    ) -> dict[str, list[list[int]] | list[list[float]]]:  # fmt: skip
        """`n` completions of each prompt (a text or its token ids).

        Returns `prompt_ids` of each prompt, and `completion_ids` and `logprobs` of each completion, ordered by prompt.
        `images` are PIL images, one or a list for each prompt (None: none), `generation_kwargs` for `SamplingParams`.
        """
        sampling = _sampling(locals())
        if isinstance(prompts, str):
            raise TypeError(f"prompts must be a list, got the text {prompts[:40]!r}.")
        shown = None if images is None else [_encoded(part) for part in images]
        return self._http.post("/generate/", {"prompts": list(prompts), "images": shown, **sampling})

    def chat(
        self, messages: list[list[Json]], n: int = 1, repetition_penalty: float = 1.0, temperature: float = 1.0,
        top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0, max_tokens: int = 16,
        truncate_prompt_tokens: int | None = None, guided_decoding_regex: str | None = None,
        generation_kwargs: Json | None = None, chat_template_kwargs: Json | None = None, tools: list | None = None,
        chat_template: str | None = None,
    ) -> dict[str, list[list[int]] | list[list[float]]]:  # fmt: skip
        """`generate` for conversations, with the chat template of the server's tokenizer or another `chat_template`."""
        sampling = _sampling(locals())
        sampling |= {"chat_template_kwargs": chat_template_kwargs, "tools": tools, "chat_template": chat_template}
        if any(isinstance(conversation, Mapping) for conversation in messages):
            raise TypeError("messages must be a list of conversations, got a single one. Put it in a list.")
        shown = [[_without_pixels(message) for message in conversation] for conversation in messages]
        return self._http.post("/chat/", {"messages": shown, **sampling})

    def reset_prefix_cache(self) -> None:
        """Clear the server's prefix cache."""
        self._http.post("/reset_prefix_cache/")

    @property
    def is_connected(self) -> bool:
        """Whether there is a weight channel to the server."""
        return self._channel is not None

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Join the weight channel (NCCL between GPUs, else gloo), in place of an older one. Raises: ConnectionError."""
        self._drop_channel()
        if self._joining is not None:  # a failed attempt must end first
            wait([self._joining])
        self._http.post("/close_communicator/")  # frees the port of an older channel
        size, place = self.get_world_size() + 1, _device(device)
        backend = "nccl" if place.type == "cuda" and self.model().get("device") == "cuda" else "gloo"

        def join() -> WeightChannel:
            address, limit = (self.host, self.group_port), CHANNEL_TIMEOUT_S
            with _on(place):
                return WeightChannel.join(*address, 0, size, backend=backend, device=place, timeout_s=limit)

        self._joining = start(join, "weight-channel").future
        wanted = {"host": self.host, "port": self.group_port, "world_size": size, "backend": backend}
        answer = self._http.post("/init_communicator/", {**wanted, "timeout_s": CHANNEL_TIMEOUT_S})
        self._channel, self.channel_name = self._joining.result(), answer.get("channel")
        atexit.register(self.close_communicator)

    def send_weights(self, shapes: Mapping[str, Tensor], weights: Iterable[Tensor]) -> None:
        """Send all weights of a checkpoint, which may be produced one after another.

        `shapes` has their names, in the order of `weights`; only the shapes and dtypes of its tensors are read. Raises:
        ServerLost if the server has no channel to this program, RuntimeError if loading fails there.
        """
        described = [_described(name, weight) for name, weight in shapes.items()]
        self._send("/update_weights/", {"weights": described}, weights)

    def update_named_param(self, name: str, weights: Tensor) -> None:
        """Send one weight, by its name in a checkpoint."""
        self._send("/update_named_param/", _described(name, weights), [weights])

    def update_model_params(self, model: nn.Module) -> None:
        """Send all weights of a model, adapters added to copies. Raises: ValueError for sharded ones."""
        parts = WeightParts(model)
        if parts.is_sharded and process_count() > 1:
            raise ValueError("model is sharded. Use VLLMServerEngine.sync_weights in all processes.")
        with parts.read() as weights:
            self.send_weights(parts.shapes, (weight for _, weight in weights))

    def close_communicator(self) -> None:
        """Close the weight channel, if it is open. A server that is lost, or serves another program, is left alone."""
        is_open, name = self.is_connected, self.channel_name
        self._drop_channel()
        self.channel_name = None
        if is_open:
            try:
                self._http.post("/close_communicator/", {"channel": name}, timeout_s=10.0)
            except (OSError, RuntimeError):
                return  # the server is gone, or another one runs there

    def _send(self, path: str, body: Json, tensors: Iterable[Tensor]) -> None:
        channel = self._channel
        if channel is None:
            raise ServerLost(f"No weight channel to {self.base_url}. Call init_communicator first.")
        if self.channel_name is not None:
            self._check_channel(self.model())

        update = start(lambda: self._http.post(path, body), "weight-update").future
        update.add_done_callback(lambda ended: ended.exception() and channel.close())  # else the sender would wait
        try:
            channel.await_receivers()  # the server may answer other requests first
            with _on(channel.device):
                channel.send(tensors)  # in this thread, because all processes may gather them together
            update.result()
        except BaseException as error:
            self._drop_channel()  # the server would wait for the rest
            failure = update.exception() if isinstance(error, Exception) else None
            if isinstance(error, ConnectionError) and failure is not None and failure is not error:
                raise failure from error
            raise

    def _check_channel(self, answer: Mapping[str, object]) -> None:
        if self.channel_name is None or answer.get("channel") == self.channel_name:
            return
        self._drop_channel()
        if answer.get("channel") is None:
            raise ServerLost(f"The server at {self.base_url} has lost its weights, perhaps by a restart.")
        raise RuntimeError(f"Another program gave weights to the server at {self.base_url}. Use one each.")

    def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            atexit.unregister(self.close_communicator)
            channel.close()


def pil_to_base64(image: "Image") -> str:
    """A PIL image as a PNG file in base64."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


_SAMPLING = (
    "n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "truncate_prompt_tokens",
    "guided_decoding_regex", "generation_kwargs",
)  # fmt: skip


def _sampling(arguments: Mapping[str, object]) -> Json:
    return {name: arguments[name] for name in _SAMPLING}


def _encoded(images: "Image | list[Image] | str | None") -> str | list[str] | None:
    if images is None or isinstance(images, str):
        return images
    return [pil_to_base64(image) for image in images] if isinstance(images, list) else pil_to_base64(images)


def _without_pixels(message: Mapping[str, object]) -> Json:
    if not isinstance(content := message.get("content"), list):
        return dict(message)
    shown = []
    for part in content:
        image = part.get("image", part.get("image_pil")) if isinstance(part, dict) else None
        shown.append(part if image is None else {"type": "image", "image": _encoded(image)})
    return {**message, "content": shown}


def _described(name: str, weight: Tensor) -> Json:
    return {"name": name, "dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}


def _device(place: torch.device | str | int) -> torch.device:
    """A device; a number means that GPU, or the CPU without GPUs."""
    if isinstance(place, int):
        return torch.device("cuda", place) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(place)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())  # other threads may have another one


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
