"""Base of engines with their own copy of the policy, such as vLLM: requests, seeds, and when weights are sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trl.generation.engine import Generated, Sampling, check_requests, completion_limits
from trl.generation.main_process import raise_in_all
from trl.generation.transformers.engine import context_length_of
from trl.generation.transformers.phase import generating, without_wrappers
from trl.generation.transformers.requests import fresh_seed, rng_stream_keys
from trl.generation.transformers.stopping import end_tokens
from trl.generation.vllm.weights import WeightParts, check_sendable
from trl.models.distributed import is_fsdp1, reshard
from trl.models.parts import causal_core

_SEEDS = 1 << 62  # vLLM takes signed 64-bit numbers


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its arguments of vLLM's `SamplingParams`, as JSON values."""

    prompt: tuple[int, ...]
    settings: Mapping[str, Any]


class PolicyCopy(ABC):
    """Completions by a copy of the policy, which `sync_weights` updates, with adapters added.

    Log-probs are the copy's, under the distribution that was sampled from; they differ from the policy's by the rounding of other
    kernels, and `kept` is unknown. `context_length` is the maximum of prompt and completion tokens (None: the model's), `regex` a
    pattern that every completion matches.
    """

    exact = False

    def __init__(
        self,
        model: nn.Module,
        *,
        accelerator: Any | None,
        context_length: int | None,
        regex: str | None,
    ) -> None:
        self.model, self.accelerator = model, accelerator
        self.context_length, self.regex = context_length, regex
        self._sent: tuple[int, ...] | None = None  # identifies the weights of the copy
        check_sendable(without_wrappers(model))

    @property
    @abstractmethod
    def together(self) -> bool:
        """Whether several processes must generate at the same time."""

    @abstractmethod
    def _completed(self, own: Sequence[Request]) -> list[Generated]:
        """The completions of this process's requests."""

    @abstractmethod
    def _send(self, parts: WeightParts) -> None:
        """Send these weights to the copy."""

    def _is_new(self, is_new: bool) -> bool:
        """Whether weights have to be sent; `is_new` is what this process finds."""
        return is_new

    def _agree(self, failure: Exception | None) -> None:
        """Raise an error in all processes that generate together."""
        raise_in_all(failure)

    def forget(self) -> None:
        """Send the weights again at the next `sync_weights`, for example after loading others."""
        self._sent = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        streams: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Generated]:
        """One completion per prompt, in order; see `Engine.generate`.

        Each request has its own seed, derived from the seed and its stream; rounding may depend on the batch.

        Raises: ValueError for invalid prompts, in all processes that generate together.
        """
        own, failure = [], None
        try:
            own = self._requests(prompts, sampling, streams, limits)
        except Exception as error:
            failure = error
        self._agree(failure)
        return self._completed(own)

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int] | None,
        limits: Sequence[int] | None,
    ) -> list[Request]:
        core = self._core()
        context_length = context_length_of(core, self.context_length)
        found, names = check_requests(prompts, streams, context_length=context_length, vocabulary=None)
        longest = completion_limits([len(prompt) for prompt in found], sampling, context_length, limits)
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        keys = rng_stream_keys(seed, names).tolist() if names else []
        ends = sorted(end_tokens(sampling.stop_token_ids, core))
        shared = _shared_settings(sampling, ends, self.regex)
        return [
            Request(prompt, shared | _own_settings(sampling, len(prompt), limit, int(key) % _SEEDS))
            for prompt, limit, key in zip(found, longest, keys, strict=True)
        ]

    def sync_weights(self, model: nn.Module, step: int) -> None:
        """Send the weights of `model` to the copy, if they changed."""
        self.model = model
        reshard(model)  # versions of gathered copies say nothing
        versions = tuple(parameter._version for parameter in model.parameters())
        state = (step, id(model), hash(versions))
        if self._is_new(state != self._sent):
            self._sent = None
            self._send_all()
            self._sent = state

    def _send_all(self) -> None:
        if not is_fsdp1(self.model):
            self._send(WeightParts(self.model))
            return
        with generating(self.model, self.accelerator) as whole:  # FSDP1 gathers the whole model only
            self._send(WeightParts(whole))

    def _core(self) -> Any:
        return causal_core(without_wrappers(self.model))


def _shared_settings(sampling: Sampling, ends: Sequence[int], regex: str | None) -> dict[str, Any]:
    """The settings that all requests of a call share."""
    sampling.refuse_processors("vLLM")
    found: dict[str, Any] = {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(ends),
        "ignore_eos": True,  # the end tokens are among stop_token_ids
        "logprobs": 0,
        "detokenize": bool(sampling.stop_strings),
    }
    if not sampling.greedy:
        found["top_p"] = 1.0 if sampling.top_p is None else sampling.top_p
        found |= {"top_k": sampling.top_k or 0, "min_p": sampling.min_p or 0.0}
    if sampling.stop_strings:
        found |= {"stop": list(sampling.stop_strings), "include_stop_str_in_output": True}
    if regex is not None:
        found["structured_outputs"] = {"regex": regex}
    return found


def _own_settings(sampling: Sampling, prompt: int, limit: int, seed: int) -> dict[str, Any]:
    """The settings of one request with a prompt of this many tokens and a completion of at most `limit`."""
    least = max(sampling.min_new_tokens, sampling.min_length - prompt, 0)
    found = {"max_tokens": limit, "min_tokens": min(limit, least)}
    return found if sampling.greedy else found | {"seed": seed}


def completion_of(ids: Sequence[int], logprobs: Sequence[float], finish_reason: str | None) -> Generated:
    """A completion of vLLM.

    Raises: RuntimeError if it was aborted.
    """
    if finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"vLLM ended a completion with {finish_reason!r}, expected 'stop' or 'length'. See its log."
        )
    return Generated(list(ids), torch.tensor(logprobs, dtype=torch.float32), None, finish_reason)
