"""What policy and reference say about the responses of a step: log-probs, values, and the rewards that follow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl.collators.rows import pad_rows
from trl.data.step_inputs import StepInputs
from trl.models.lending import undisturbed, without_ddp
from trl.models.policy import make_scorer
from trl.models.reference import Reference
from trl.models.setup import pad_token_id
from trl.rollouts.response_scores import ResponseScorer, concatenated, join_rows
from trl.trainer.ppo_config import PPOConfig


class ScoredRollout(NamedTuple):
    """Of B responses, each `(B, R)`: what policy and reference say, and the rewards of their tokens."""

    logps: Tensor
    ref_logps: Tensor
    values: Tensor
    masks: Tensor
    rewards: Tensor
    non_score: Tensor
    kls: Tensor


class ScoresRollouts:
    """The forward passes of a step without gradient, `mini_batch_size` responses at a time."""

    config: PPOConfig
    accelerator: Accelerator
    model: Any
    tokenizer: Any
    reference: Reference
    is_encoder_decoder: bool
    compute_rewards: Any
    _scorer: ResponseScorer

    def prepare_model_inputs(self, queries: list[Tensor], responses: list[Tensor]) -> dict[str, Tensor]:
        """Padded inputs of a model on the trainer's device, `(B, T)` each: `input_ids` and `attention_mask` of query and
        response. An encoder-decoder's are those of the queries, and `decoder_...` those of the responses.

        For programs that call a model themselves; `step` scores without padding and does not use it.
        """
        if not self.is_encoder_decoder:
            return self._padded([torch.cat(row) for row in zip(queries, responses, strict=True)])
        decoder = {f"decoder_{name}": value for name, value in self._padded(responses).items()}
        return {**self._padded(queries), **decoder}

    def _padded(self, rows: list[Tensor]) -> dict[str, Tensor]:
        columns = {
            "input_ids": (rows, pad_token_id(self.tokenizer)),
            "attention_mask": ([torch.ones_like(row) for row in rows], 0),
        }
        side, device = self.tokenizer.padding_side, self.accelerator.device
        return {
            name: pad_rows(found, value, side=side).to(device) for name, (found, value) in columns.items()
        }

    def batched_forward_pass(
        self,
        model: Any,
        queries: list[Tensor],
        responses: list[Tensor],
        model_inputs: dict[str, Any] | None = None,
        return_logits: bool = False,
        response_masks: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Log-probs, logits (None unless `return_logits`), values and masks of responses, `(B, R)`; logits `(B, R, V)`.

        `model` is this trainer's, its reference, or another with or (values are None) without a value head. `model_inputs`
        are not needed: queries and responses say everything.
        """
        del model_inputs
        scorer, model = self._scorer_of(model)
        size = self.config.mini_batch_size
        parts = []
        for begin in range(0, len(queries), size):
            rows = slice(begin, begin + size)
            with self.accelerator.autocast():
                parts.append(scorer.score(model, queries[rows], responses[rows], logits=return_logits))
        found = concatenated(parts)
        given = response_masks or [torch.ones_like(response) for response in responses]
        return found.logps, found.logits, found.values, pad_sequence(given, batch_first=True)

    def _scorer_of(self, model: Any) -> tuple[ResponseScorer, Any]:
        """What scores a model, and the module to call: of a reference with a value head the model inside."""
        if model is self.model or self.accelerator.unwrap_model(model) is self._scorer.scorer.wrapper:
            return self._scorer, model
        scored = getattr(self.reference, "model", None)
        inner = getattr(model, "pretrained_model", model)
        if scored is not None and (model is scored or inner is getattr(self.reference, "module", None)):
            return ResponseScorer(self.reference.scorer, is_encoder_decoder=self.is_encoder_decoder), scored
        made = make_scorer(model, self.tokenizer)
        return ResponseScorer(made, is_encoder_decoder=self.is_encoder_decoder), model

    @torch.no_grad()
    def score_rollout(self, inputs: StepInputs, scores: Tensor, times: dict[str, float]) -> ScoredRollout:
        """Everything of a step's responses that is known before its first update; `times` takes the seconds of its parts.

        The whole distributions that `kl_penalty="full"` compares are held for one minibatch at a time.
        """
        rows = len(inputs.queries)
        size = self.config.mini_batch_size if self.config.kl_penalty == "full" else rows
        parts = [
            self._scored_rows(inputs, scores, slice(begin, begin + size), times)
            for begin in range(0, rows, size)
        ]
        return ScoredRollout(*(join_rows(columns) for columns in zip(*parts, strict=True)))

    def _scored_rows(
        self, inputs: StepInputs, scores: Tensor, rows: slice, times: dict[str, float]
    ) -> tuple[Tensor, ...]:
        full = self.config.kl_penalty == "full"
        texts = inputs.queries[rows], inputs.responses[rows]
        options: dict[str, Any] = {"return_logits": full, "response_masks": inputs.masks[rows]}
        policy = without_ddp(self.model)
        with timed(times, "forward_pass"):
            with undisturbed(policy):
                logps, logits, values, masks = self.batched_forward_pass(policy, *texts, **options)
            with self.reference.active(self.model) as reference:
                ref_logps, ref_logits, *_ = self.batched_forward_pass(reference, *texts, **options)
        with timed(times, "compute_rewards"):
            compared = logps, ref_logps
            if logits is not None and ref_logits is not None:
                compared = _distribution(logits), _distribution(ref_logits)
            rewards, non_score, kls = self.compute_rewards(scores[rows], *compared, masks)
        assert values is not None
        return logps, ref_logps, values, masks, rewards, non_score, kls


def _distribution(logits: Tensor) -> Tensor:
    """Log-probs of the whole vocabulary, in float32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that a block takes to `times`."""
    began = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - began
