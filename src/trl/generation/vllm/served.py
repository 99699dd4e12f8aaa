"""The vLLM server of a run: found and checked before the first step."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from trl.generation.main_process import by_main
from trl.generation.transformers.engine import MIXED, context_length_of
from trl.generation.vllm.client import VLLMClient
from trl.generation.vllm.server_engine import VLLMServerEngine
from trl.models.parts import causal_core
from trl.models.policy import Policy

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    """A server that answers, and what it serves: its context length in tokens of prompt and completion, its vocabulary's size, its
    dtype. Only the main process has the `client`."""

    client: VLLMClient | None
    address: str
    model: str
    context_length: int
    vocabulary: int
    dtype: str


def served_of(args: Any) -> Served:
    """The server that `args` name, waited for by the main process.

    Raises: ConnectionError where it does not answer within `vllm_server_timeout` seconds, PermissionError for a wrong token.
    """
    made: list[VLLMClient] = []

    def ask() -> Served:
        client = VLLMClient(
            args.vllm_server_base_url,
            args.vllm_server_host,
            args.vllm_server_port,
            args.vllm_group_port,
            args.vllm_server_timeout,
        )
        made.append(client)
        facts = client.model()
        found = facts["model"], int(facts["max_model_len"]), int(facts["vocab_size"]), facts["dtype"]
        return Served(None, client.base_url, *found)

    served = by_main(ask)
    return served._replace(client=made[0] if made else None)


def check_served(served: Served, args: Any, policy: Policy) -> None:
    """Raise ValueError where the server cannot stand for the policy: another vocabulary, or a context length that is too small."""
    vocabulary = causal_core(policy.model).config.get_text_config().vocab_size
    where = f"the vLLM server at {served.address} serves {served.model}"
    if served.vocabulary != vocabulary:
        raise ValueError(
            f"{where}, with a vocabulary of {served.vocabulary}, expected the policy's, {vocabulary}. Start it with the model that is "
            "trained: `trl vllm-serve --model <model>`."
        )
    room, longest = args.max_completion_length or 1, args.max_prompt_length or 1
    if (
        args.max_prompt_length == type(args).max_prompt_length
    ):  # prompts are checked themselves where they are prepared
        longest = 1
    own = context_length_of(policy.model, getattr(args, "vllm_max_model_length", None))
    if served.context_length < room + longest and (own is None or own >= room + longest):
        raise ValueError(
            f"{where}, with a context length of {served.context_length} tokens, expected at least {room + longest}: max_prompt_length="
            f"{args.max_prompt_length} and max_completion_length={args.max_completion_length}. Start it with --max_model_len "
            f"{room + longest}, or lower them."
        )
    dtype = _dtype_of(args, policy)
    if served.dtype != dtype:
        logger.warning(
            "%s in %s, and the policy is trained in %s: completions are sampled from probabilities that differ by the rounding. Start "
            "the server with --dtype %s.", where, served.dtype, dtype, dtype
        )  # fmt: skip


def server_engine(
    served: Served, args: Any, model: Any, *, context_length: int | None, accelerator: Any
) -> VLLMServerEngine:
    """What generates through the server."""
    return VLLMServerEngine(
        model,
        served.client,
        accelerator=accelerator,
        context_length=context_length,
        regex=args.vllm_guided_decoding_regex,
        patience=args.vllm_server_timeout,
    )


def _dtype_of(args: Any, policy: Policy) -> str:
    mixed = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    dtype: torch.dtype = MIXED.get(mixed) or causal_core(policy.model).dtype
    return str(dtype).removeprefix("torch.")
