"""Engines of comparisons: the geometric mixture of a policy and its reference, and two engines that take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl.generation.engine import Engine, Generated, Sampling
from trl.generation.live import Live, LiveCalls
from trl.generation.transformers.cache import RolloutCache, rollout_attention_of
from trl.generation.transformers.decode_check import decode_unsupported
from trl.generation.transformers.decoders import FusedDecoder, OwnForward, fused_unsupported
from trl.generation.transformers.engine import TransformersEngine, generating
from trl.generation.transformers.model_generate import MoreInputs
from trl.generation.transformers.requests import Requests
from trl.generation.transformers.rollout_loop import RolloutLoop, default_rows
from trl.generation.transformers.steps import Moves, Step
from trl.models.parts import causal_core, embedded_tokens
from trl.models.reference import AdapterReference, FrozenModel, Reference
from trl.models.switches import same_trainable


class MixtureEngine(TransformersEngine):
    """Completions by the geometric mixture `p^(1 - c) p_ref^c` of the policy and its reference, at each token.

    `coefficient()` is c in [0, 1] at present: 0 is the policy, 1 the reference. The logits of both are averaged, which
    is the mixture of their distributions. Raises: ValueError for a model that our cache does not support. Source: Munos
    et al. 2023, Nash-MD, section 4 (arXiv:2312.00886).
    """

    def __init__(
        self, model: nn.Module, reference: Reference, *, coefficient: Callable[[], float], **parts: Any
    ) -> None:
        super().__init__(model, **parts)
        if reason := decode_unsupported(model):
            raise ValueError(f"this model does not support an opponent: {reason}. Use OnlineDPOTrainer.")
        self.reference, self.coefficient = reference, coefficient

    @property
    def exact(self) -> bool:
        return False

    @contextmanager
    def live(self) -> Iterator[Live]:
        """Requests by `generate`: a mixture has no steps of its own."""
        yield LiveCalls(self)

    def _run(
        self, model: nn.Module, core: PreTrainedModel, requests: Requests, dtype: torch.dtype | None,
        more_inputs: MoreInputs | None,
    ) -> None:  # fmt: skip
        share = self.coefficient()
        with ExitStack() as stack:
            if isinstance(self.reference, FrozenModel):
                gathered = generating(self.reference.model, self.accelerator, gather_zero3=self.gather_zero3)
                other, switched = stack.enter_context(gathered), nullcontext
            else:  # the policy with another adapter, which is switched at each token
                assert isinstance(self.reference, AdapterReference)
                other, switched = model, partial(self.reference.switched, model)
                stack.enter_context(same_trainable(model))
            members = [
                _Member(member, weight, block, dtype)
                for member, weight, block in ((model, 1 - share, nullcontext), (other, share, switched))
                if weight
            ]
            mixture: Any = _Mixture(members)
            with members[0].active() as decoder:
                rows = self.max_batch or default_rows(
                    requests, vocabulary=embedded_tokens(core), **decoder.bytes_of_row()
                )
            RolloutLoop(mixture, mixture, requests, max_rows=max(1, rows // len(members))).run()


class _Member:
    """A model of a mixture, with its cache."""

    def __init__(
        self, model: nn.Module, weight: float, switched: Callable[[], AbstractContextManager[object]],
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.core, self.weight, self.switched = causal_core(model), weight, switched
        self.cache = RolloutCache()
        with switched():
            parts, is_fused = (self.core, self.cache), fused_unsupported(self.core) is None
            self.decoder = FusedDecoder(*parts, dtype=dtype) if is_fused else OwnForward(*parts)

    @contextmanager
    def active(self) -> Iterator[OwnForward]:
        with self.switched(), rollout_attention_of(self.core, self.cache):
            yield self.decoder


class _Mixture:
    """Decoder and cache of a `RolloutLoop`: those of all members, and the weighted sum of their logits."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self.members = members

    def prefill(self, prompts: Sequence[Sequence[int]], held: Sequence[None] = ()) -> Tensor:
        return self._mixed(lambda decoder: decoder.prefill(prompts))

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._mixed(lambda decoder: decoder.decode(tokens, positions))

    def _mixed(self, run: Callable[[OwnForward], Tensor]) -> Tensor:
        parts = []
        for member in self.members:
            with member.active() as decoder:
                parts.append(member.weight * run(decoder))
        return sum(parts[1:], parts[0])

    @property
    def step(self) -> Step | None:
        return self.members[0].cache.step

    def __setattr__(self, name: str, value: object) -> None:
        if name == "members":
            super().__setattr__(name, value)
        else:  # the step, and the sizes to allocate for
            for member in self.members:
                setattr(member.cache, name, value)

    def drop_rows(self, moves: Moves, width: int) -> None:
        for member in self.members:
            member.cache.drop_rows(moves, width)

    def drop_prompts(self, moves: Moves) -> None:
        for member in self.members:
            member.cache.drop_prompts(moves)


class TurnsEngine:
    """Completes the requests 0, 2, ... by one engine and 1, 3, ... by the other, an opponent."""

    def __init__(self, policy: Engine, opponent: Engine) -> None:
        self.policy, self.opponent = policy, opponent

    @property
    def exact(self) -> bool:
        return self.policy.exact  # nothing needs the opponent's log-probs

    @property
    def together(self) -> bool:
        return self.policy.together or self.opponent.together

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, streams: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Generated]:  # fmt: skip
        """One completion for each prompt, in order; see `Engine.generate`."""
        names = range(len(prompts)) if streams is None else streams
        completions: list[Any] = [None] * len(prompts)
        for turn, engine in enumerate((self.policy, self.opponent)):
            some = None if limits is None else limits[turn::2]
            completions[turn::2] = engine.generate(prompts[turn::2], sampling, streams=names[turn::2], limits=some)
        return completions

    def sync_weights(self, model: nn.Module, step: int) -> None:
        """Use the weights of `model` in both."""
        self.policy.sync_weights(model, step)
        self.opponent.sync_weights(model, step)

    def close(self) -> None:
        self.policy.close()
        self.opponent.close()
