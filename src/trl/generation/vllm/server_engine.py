"""vLLM in a separate server: rollouts from its copy of the policy, checks of the server before the first step."""

import itertools
import logging
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from trl.generation.live import Listener, Live
from trl.generation.main_process import by_main, process_count, through_main
from trl.generation.serving.connection import HangUp, ServerLost
from trl.generation.transformers.engine import MIXED, context_length_of
from trl.generation.vllm.backend import Answer, Request
from trl.generation.vllm.client import VLLMClient
from trl.generation.vllm.engine import LiveCopy, PolicyCopy
from trl.generation.vllm.weights import WeightParts
from trl.models.parts import causal_core
from trl.models.policy import Policy
from trl.reporting.deadlines import start

logger = logging.getLogger(__name__)
_PAUSE_S = 0.005  # in which requests may arrive


class Served(NamedTuple):
    """A server that answers. Only the main process has the `client`."""

    client: VLLMClient | None
    address: str
    model: str
    context_length: int
    vocabulary: int
    dtype: str


def served_of(args: Any) -> Served:
    """The server of `args`; the main process waits for it. Raises: ConnectionError, PermissionError."""
    client: VLLMClient | None = None

    def connect() -> Served:
        nonlocal client
        address = (args.vllm_server_base_url, args.vllm_server_host, args.vllm_server_port)
        client = VLLMClient(*address, args.vllm_group_port, args.vllm_server_timeout)
        facts = client.model()
        lengths = int(facts["max_model_len"]), int(facts["vocab_size"])
        return Served(None, client.base_url, facts["model"], *lengths, facts["dtype"])

    return by_main(connect)._replace(client=client)


def served_policy(policy: Policy, args: Any, served: Served) -> Policy:
    """The policy with the context length of the server that generates for it.

    Raises: ValueError if the server has another vocabulary than the policy, or too small a context length.
    """
    core = causal_core(policy.model)
    vocabulary = core.config.get_text_config().vocab_size
    where = f"the vLLM server at {served.address} serves {served.model}"
    if served.vocabulary != vocabulary:
        other = f"a vocabulary of {served.vocabulary}, not the policy's {vocabulary}"
        raise ValueError(f"{where}, with {other}. Serve the trained model.")
    # The default of max_prompt_length is no promise: prompts are checked when they are prepared.
    is_default = args.max_prompt_length == type(args).max_prompt_length
    needed = (args.max_completion_length or 1) + (1 if is_default else args.max_prompt_length or 1)
    length = context_length_of(policy.model, getattr(args, "vllm_max_model_length", None))
    if served.context_length < needed and (length is None or length >= needed):
        lengths = f"a context length of {served.context_length}, expected {needed}"
        needs = "max_prompt_length and max_completion_length"
        raise ValueError(f"{where}, with {lengths} for {needs}. Start it with --max_model_len {needed}.")
    mixed = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    dtype = str(MIXED.get(mixed) or core.dtype).removeprefix("torch.")
    if served.dtype != dtype:
        logger.warning("%s in %s: log-probs differ by rounding. Start it with --dtype %s.", where, served.dtype, dtype)
    return policy._replace(context_length=served.context_length)


class VLLMServerEngine(PolicyCopy):
    """Completions by a server of `trl vllm-serve`.

    Only the main process has a `client`, through which the requests of all processes go in one call. So all processes
    must call `generate`, `sync_weights` and `live` together, with any number of requests each, and errors are raised in
    all of them. A server that was restarted gets its weights again, after at most `patience` seconds (an error in
    `live`). Weights are sent from `device` (None: the policy's).
    """

    def __init__(
        self, model: nn.Module, client: VLLMClient | None, *, accelerator: Accelerator | None = None,
        context_length: int | None = None, regex: str | None = None, patience: float = 240.0,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, accelerator=accelerator, context_length=context_length, regex=regex)
        self.client, self.patience, self._device = client, patience, device

    @property
    def together(self) -> bool:
        return process_count() > 1

    @contextmanager
    def live(self) -> Iterator[Live]:
        """Inside the block, requests come and go. Raises: ConnectionError for a server that is lost or restarted."""
        address, name = by_main(lambda: (self._connected().base_url, self._connected().channel_name))
        client = self.client or VLLMClient(address)
        client.channel_name = name
        with closing(ServedSteps(client)) as steps:
            try:
                yield LiveCopy(self, steps)
            except Exception:
                self._sent = None  # the server's weights are unknown
                raise

    def close(self) -> None:
        """Disconnect from the server, which continues to run."""
        self._sent = None
        if self.client is not None:
            self.client.close_communicator()

    def _completed(self, requests: list[Request]) -> list[Answer]:
        try:
            answers = through_main(requests, self._complete)
            if answers is None:  # in all processes
                self._send_all()
                answers = through_main(requests, self._complete)
            if answers is None:
                raise ConnectionError("The vLLM server lost its weights twice in a row. See its log.")
        except Exception:
            self._sent = None  # the server's weights are unknown
            raise
        return answers

    def _complete(self, of_processes: list[list[Request]]) -> list[list[Answer] | None]:
        requests = [request for part in of_processes for request in part]
        try:
            answers = iter(self._connected().complete(requests) if requests else [])
        except ServerLost as lost:
            if self._sent is None:  # it never had weights
                raise
            logger.warning("%s It gets the weights of this step again.", lost)
            return [None] * len(of_processes)
        return [[next(answers) for _ in part] for part in of_processes]

    def _send(self, parts: WeightParts) -> None:
        retry = by_main(self._connect)
        while not by_main(partial(self._deliver, parts, retry=retry), meanwhile=parts.take_part):
            by_main(partial(self._connect, anew=True))
            retry = False

    def _connect(self, *, anew: bool = False) -> bool:
        """Join the server's weight channel if it is not joined, or `anew`; whether it was joined before."""
        client = self._connected()
        was_connected = client.is_connected
        if anew or not was_connected:
            client.check_server(self.patience)
            device = self._device or getattr(self.accelerator, "device", None)
            client.init_communicator(device or next(self.model.parameters()).device)
        return was_connected

    def _deliver(self, parts: WeightParts, *, retry: bool) -> bool:
        """Send the weights; False if the server was lost and there is a `retry`."""
        try:
            with parts.read() as weights:
                self._connected().send_weights(parts.shapes, (weight for _, weight in weights))
        except ServerLost as lost:
            if not retry:
                raise
            logger.warning("%s", lost)
            return False
        return True

    def _connected(self) -> VLLMClient:
        assert self.client is not None  # in the main process
        return self.client


class ServedSteps:
    """Requests to a server that come and go, each by a call of its own, on a thread; see `Steps`."""

    def __init__(self, client: VLLMClient) -> None:
        self.client = client
        self._numbers = itertools.count()
        self._running: dict[int, tuple[HangUp, Listener | None]] = {}
        self._ended: queue.SimpleQueue[tuple[int, Future[list[Answer]]]] = queue.SimpleQueue()

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, request: Request, listener: Listener | None = None) -> int:
        """Begin a completion; its number. A `listener` is given all of its tokens at the end."""
        number, hang_up = next(self._numbers), HangUp()
        self._running[number] = hang_up, listener
        call = start(partial(self.client.complete, [request], hang_up=hang_up), "vllm-request")
        call.future.add_done_callback(lambda future: self._ended.put((number, future)))
        return number

    def cancel(self, request: int) -> None:
        if request in self._running:
            hang_up, _ = self._running.pop(request)
            hang_up()

    def step(self) -> dict[int, Answer]:
        """Wait a moment; the answer to a request that ended. Raises: what the server's answer raises."""
        with suppress(queue.Empty):
            number, future = self._ended.get(timeout=_PAUSE_S)
            if number in self._running:  # else it was cancelled
                _, listener = self._running.pop(number)
                (answer,) = future.result()
                if listener is not None:
                    listener(answer["ids"])
                return {number: answer}
        return {}

    def close(self) -> None:
        for number in list(self._running):
            self.cancel(number)
