"""A policy and a separate value model as one module, for DDP, one optimiser and one checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from trl.models.packed.layout import Columns
from trl.models.parts import replaced_forward
from trl.models.scoring.causal import Scored, Scorer
from trl.models.scoring.classifier import ClassificationScorer
from trl.models.scoring.head import Routing, ScoreOptions
from trl.models.switches import checkpointed_modules
from trl.options.checks import CHECKPOINTING

POLICY, VALUE = "policy.", "value_model."
INVALID_LOGPROB = 1.0  # marks padding in log-probs of older loops: no token's is above 0


def _in_both(method: str) -> Callable[..., None]:
    """A method that calls `method` of the policy and, where it can recompute activations, of the value model."""

    def call(self: PolicyAndValue, *args: object, **kwargs: object) -> None:
        for model in (self.policy, self.value_model):
            if getattr(model, "supports_gradient_checkpointing", True):
                getattr(model, method)(*args, **kwargs)

    return call


class PolicyAndValue(nn.Module):
    """`policy` and `value_model` side by side; called like a model, it is the policy."""

    def __init__(self, policy: nn.Module, value_model: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value_model = value_model

    @property
    def config(self) -> PretrainedConfig:
        """The policy's config."""
        return self.policy.config  # type: ignore[return-value]

    @property
    def pretrained_model(self) -> nn.Module:
        """The policy, under the name that generation looks for."""
        return self.policy

    @property
    def device(self) -> torch.device:
        """The policy's device."""
        return next(self.policy.parameters()).device

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The policy's forward."""
        return self.policy(*args, **kwargs)


for _method in (f"{name}_{switch}" for name in CHECKPOINTING for switch in ("enable", "disable")):
    setattr(PolicyAndValue, _method, _in_both(_method))


class PolicyAndValueWrapper(PolicyAndValue):
    """`PolicyAndValue` for loops over padded rows: called, it gives the policy's output and the values `(B, T, 1)`."""

    def __init__(self, policy: nn.Module, value_model: nn.Module) -> None:
        super().__init__(policy, value_model)
        self.critic_backbone = getattr(value_model, value_model.base_model_prefix)  # pyright: ignore[reportArgumentType]
        self.is_gradient_checkpointing = bool(checkpointed_modules(policy))

    def forward(self, **kwargs: object) -> Any:
        """Both models on the same inputs."""
        states = self.critic_backbone(**{**kwargs, "return_dict": True}).last_hidden_state
        return self.policy(**kwargs), self.value_model.score(states)  # pyright: ignore[reportCallIssue]


class PolicyValueScorer:
    """Scores with both models of a `PolicyAndValue` in one forward: log-probs of the policy, values of the value model.

    `policy` is the scorer of the policy alone, `value` that of the value model, a classifier with one label.
    """

    def __init__(self, wrapper: PolicyAndValue, policy: Scorer, value: ClassificationScorer) -> None:
        self.wrapper, self.policy, self.value = wrapper, policy, value
        self.core, self.pad_token_id = policy.core, policy.pad_token_id
        self.stretched_rotaries = policy.stretched_rotaries
        self.fallbacks = [*policy.fallbacks, *(f"value model: {text}" for text in value.fallbacks)]
        self.packed: bool = policy.packed and value.packed
        self.with_table: bool = policy.with_table and value.with_table
        self.shares_prefixes: bool = policy.shares_prefixes and value.shares_prefixes
        self.router_weight, self.is_balanced = policy.router_weight, policy.is_balanced
        self.routing_of_step: Routing | None = None
        self.neftune_alpha: float | None = None  # noise on the policy's embeddings
        self.group = policy.group

    def score(self, model: nn.Module, batch: Columns, options: ScoreOptions | None = None) -> Scored:
        """`Scorer.score` of the policy, with `values (K,)`, in float32 or wider, of the states that predict the tokens.

        `model` is the `PolicyAndValue`, maybe wrapped by DDP and its kin.
        """
        self.policy.neftune_alpha, self.policy.routing_of_step = self.neftune_alpha, self.routing_of_step

        def both() -> Scored:
            scored = self.policy.score(self.wrapper.policy, batch, options)
            return scored._replace(values=self._values(self.wrapper.value_model, batch))

        with replaced_forward(self.wrapper, both):
            return model()

    def routing(self, model: nn.Module, batch: Columns) -> Routing:
        """`Scorer.routing` of the policy."""
        with replaced_forward(self.wrapper, lambda: self.policy.routing(self.wrapper.policy, batch)):
            return model()

    def score_values(self, model: nn.Module, batch: Columns) -> Tensor:
        """The values alone, `(K,)`."""
        with replaced_forward(self.wrapper, lambda: self._values(self.wrapper.value_model, batch)):
            return model()

    def _values(self, value_model: nn.Module, batch: Columns) -> Tensor:
        logits, _ = self.value.score_predictors(value_model, batch)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits[:, 0].to(wide, copy=True)  # FSDP2 warns of outputs that are views
