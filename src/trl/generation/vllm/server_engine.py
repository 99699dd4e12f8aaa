"""vLLM in a server of its own: rollouts from a copy of the policy that is sent there before each phase."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trl.generation.engine import Generated
from trl.generation.main_process import any_process, by_main, process_count, through_main
from trl.generation.serving.connection import ServerLost
from trl.generation.vllm.client import VLLMClient
from trl.generation.vllm.policy_copy import PolicyCopy, Request, completion_of
from trl.generation.vllm.weights import WeightParts

logger = logging.getLogger(__name__)

_Answers = list[dict[str, Any]] | None  # of one process; None: the server lost its weights


class VLLMServerEngine(PolicyCopy):
    """Completions by a server that `trl vllm-serve` started.

    Only the main process has a `client`; the requests of all processes go through it, in one call, so that they must generate
    and `sync_weights` together, with any number of requests each. What goes wrong there is raised in all of them. A server that
    is started anew gets its weights again: `patience` is how many seconds to wait for it. `device` is where weights are sent
    from (None: the policy's).
    """

    def __init__(
        self,
        model: nn.Module,
        client: VLLMClient | None,
        *,
        accelerator: Any | None = None,
        context_length: int | None = None,
        regex: str | None = None,
        patience: float = 240.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(model, accelerator=accelerator, context_length=context_length, regex=regex)
        self.client, self.patience, self._device = client, patience, device

    @property
    def together(self) -> bool:
        """Whether other processes generate through the same client."""
        return process_count() > 1

    def close(self) -> None:
        """Leave the server, which goes on serving."""
        self._sent = None
        if self.client is not None:
            self.client.close_communicator()

    def _is_new(self, is_new: bool) -> bool:
        return any_process(is_new)

    def _completed(self, own: Sequence[Request]) -> list[Generated]:
        asked = [{"prompt_ids": list(one.prompt), "sampling": dict(one.settings)} for one in own]
        try:
            answers = self._answers(asked)
        except Exception:
            self._sent = None  # whose weights the server has is not known: whoever goes on sends them first
            raise
        return [completion_of(one["ids"], one["logprobs"], one["finish_reason"]) for one in answers]

    def _answers(self, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answers: _Answers = through_main(asked, self._ask)
        if answers is None:  # in all processes
            self._send_all()
            answers = through_main(asked, self._ask)
        if answers is None:
            raise ConnectionError(
                "The vLLM server lost its weights twice in a row. See its log for the reason."
            )
        return answers

    def _ask(self, asked: list[list[dict[str, Any]]]) -> list[_Answers]:
        """The server's answers to the requests of each process; None to each where it lost the weights."""
        requests = [request for part in asked for request in part]
        if not requests:
            return [[] for _ in asked]
        try:
            answers = iter(self._connected().complete(requests))
        except ServerLost as lost:
            if self._sent is None:  # never had any, or lost them just now
                raise
            logger.warning("%s It gets the weights of this step again.", lost)
            return [None] * len(asked)
        return [[next(answers) for _ in part] for part in asked]

    def _send(self, parts: WeightParts) -> None:
        was_connected = by_main(self._connect)
        if self._sent_by_main(parts, again=was_connected):
            return
        by_main(lambda: self._connect(anew=True))
        self._sent_by_main(parts, again=False)

    def _sent_by_main(self, parts: WeightParts, *, again: bool) -> bool:
        """Send the weights; False where the server was lost, and is to be sent them `again`."""
        return by_main(lambda: self._deliver(parts, again), meanwhile=parts.take_part)

    def _connect(self, *, anew: bool = False) -> bool:
        """Join the server's weight channel, unless that was done before and is not to be done `anew`; whether it was."""
        client = self._connected()
        was_connected = client.is_connected
        if anew or not was_connected:
            client.check_server(self.patience)
            client.init_communicator(self._place())
        return was_connected

    def _deliver(self, parts: WeightParts, again: bool) -> bool:
        try:
            with parts.read() as weights:
                self._connected().send_weights(parts.shapes, (weight for _, weight in weights))
        except ServerLost as lost:
            if not again:
                raise
            logger.warning("%s", lost)
            return False
        return True

    def _connected(self) -> VLLMClient:
        if self.client is None:
            raise ValueError(
                "client is None in the main process, expected a VLLMClient. Other processes have none."
            )
        return self.client

    def _place(self) -> torch.device | str:
        if self._device is not None:
            return self._device
        return getattr(self.accelerator, "device", None) or next(self.model.parameters()).device
