"""Option groups that the configs of several methods share: preferences, references, PPO and rewards."""

from dataclasses import dataclass
from typing import Literal

from trl.options.checks import JSONDict
from trl.options.groups import OptionGroup, option
from trl.options.shared import shared
from trl.options.training import RowOptions

TruncationMode = Literal["keep_end", "keep_start"]
RewardFailure = Literal["error", "skip"]
SYNC_SETTINGS = ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")


@dataclass
class PreferenceOptions(RowOptions):
    """What DPO, CPO, ORPO, KTO and BCO share."""

    max_prompt_length: int | None = shared("max_prompt_length")
    max_completion_length: int | None = shared("max_completion_length")
    truncation_mode: TruncationMode = option("keep_end", "Kept end of a long text: keep_end or keep_start.")
    disable_dropout: bool = shared("disable_dropout")
    generate_during_eval: bool = option(False, "At evaluations, log completions of policy and reference.")
    label_pad_token_id: int = option(-100, "Label of untrained positions: only -100.", "[-100, -100]")
    padding_value: int | None = option(None, "Padding token id. None: that of pad_token.", "(-inf, inf)")

    def prompt_limit(self, *, is_encoder_decoder: bool) -> int | None:
        """`max_prompt_length`; None where its default is no less than `max_length`, which then limits prompts alone."""
        return self.max_prompt_length if is_encoder_decoder or not self._default_fills_length() else None

    def _default_fills_length(self) -> bool:
        limit, length = self.max_prompt_length, self.max_length
        if limit is None or length is None or limit != type(self).max_prompt_length:
            return False
        return limit >= length - 2  # places of KTO's begin token and eos


@dataclass
class PromptFirstOptions(PreferenceOptions):
    """Prompts are cut first, and only where prompt and completion together are too long. For CPO, ORPO, KTO and BCO."""

    max_prompt_length: int | None = shared(
        "max_prompt_length",
        help="Length of a prompt, in tokens, where it and its completion exceed max_length (at most half of that by "
        "default); completions keep the rest. None: no limit.",
    )
    max_completion_length: int | None = shared(
        "max_completion_length", help="Longest completion of an encoder-decoder, in tokens. None: no limit."
    )
    is_encoder_decoder: bool | None = option(None, "None: as the model's config says.", flag=True)

    def prompt_limit(self, *, is_encoder_decoder: bool) -> int | None:
        """`max_prompt_length`; half of `max_length` where its default would leave completions no room in that."""
        if is_encoder_decoder or not self._default_fills_length():
            return self.max_prompt_length
        return max(self.max_length // 2, 1)  # type: ignore[operator]


@dataclass
class ReferencePolicy(OptionGroup):
    """The implicit reward and the reference policy of DPO, KTO and BCO."""

    beta: float = option(0.1, "Scale of the implicit reward. Larger: closer to the reference.")
    ref_model_init_kwargs: JSONDict = option(None, "Loading arguments of ref_model.")
    precompute_ref_log_probs: bool = option(False, "Score the dataset before the first step; kept on disk.")


@dataclass
class PPOOptions(OptionGroup):
    """Generalised advantage estimation, and PPO's losses of policy and value function."""

    gamma: float = option(1.0, "Discount of rewards, per token.", "[0, 1]")
    lam: float = option(0.95, "Lambda of generalised advantage estimation. 0: values alone.", "[0, 1]")
    whiten_rewards: bool = option(False, "Scale the tokens' rewards to unit variance.")
    cliprange: float = option(0.2, "How far the ratio of probabilities may leave 1 unclipped.", "(0, inf]")
    cliprange_value: float = option(0.2, "How far a value may leave the rollout's unclipped.", "(0, inf]")
    vf_coef: float = option(0.1, "Weight of the value loss beside the policy loss, >= 0.")


@dataclass
class RewardPolicy(OptionGroup):
    """Weights of reward functions and models, and what happens if they fail."""

    reward_weights: list[float] | None = option(None, "Weight of each reward in the sum. None: 1 each.")
    reward_deadline: float | None = option(None, "Seconds per reward call. None: no limit.", "(0, inf]")
    reward_failure: RewardFailure = option("error", "Failed rewards: 'error', or 'skip' leaves them out.")


@dataclass
class JudgeOptions(OptionGroup):
    """Cache, orders, attempts and budget of a pairwise judge."""

    judge_cache: str | None = option(None, "File (SQLite) that keeps the judge's answers, for all runs. None: none.")
    judge_swap_positions: bool = option(False, "Show each pair in both orders; the mean counts, so 0 and 1 tie.")
    judge_retries: int = option(0, "Further attempts if the judge fails or does not answer.", ">= 0")
    judge_max_calls: int | None = option(None, "Most comparisons sent by a process. None: no limit.", ">= 0")
    judge_max_tokens: int | None = option(None, "The judge's tokens after which none is sent. None: no limit.", ">= 0")


@dataclass
class ReferenceSync(OptionGroup):
    """A reference that follows the policy (TR-DPO)."""

    sync_ref_model: bool = option(False, "Mix the policy into the reference every ref_model_sync_steps.")
    ref_model_mixup_alpha: float = option(0.6, "Share of the policy in that mixture.", "[0, 1]")
    ref_model_sync_steps: int = option(512, "Optimiser steps between two updates of the reference.", ">= 1")
