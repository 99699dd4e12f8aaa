"""Signs in the logs of a run that something is wrong. The thresholds are rules of thumb (docs/guides/report.md)."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from trl.reporting.run_events import Event

WINDOW = 3  # logs over which a mean is taken
USUAL = 20  # logs whose median gradient is the usual one, and over which an accuracy of 0.5 counts as stuck
LONGEST_TEXT = 4_000  # characters of a completion that are searched for repetitions
LEAST_WORDS = 20  # of a completion that may count as repeated
ALIASES = {
    "reward_mean": "reward", "objective/scores": "reward", "policy/clipfrac_avg": "clip_ratio/region_mean",
    "accuracy": "rewards/accuracies",
}  # fmt: skip


class Sign(NamedTuple):
    """A sign with its sentence, and the step at which it is seen first."""

    step: int
    name: str
    text: str


class Rule(NamedTuple):
    """A sign that shows where `holds` for means of a metric: the first one, and those over `window` logs that have it.

    With `rising` it shows only where that metric is above its first mean.
    """

    name: str
    metric: str
    holds: Callable[[float, np.ndarray], np.ndarray]
    text: str
    rising: str | None = None
    window: int = WINDOW


def spikes(_: float, norms: np.ndarray) -> np.ndarray:
    """Where a norm is above ten times the median of those before it."""
    before = [norms[max(0, at - USUAL) : at] for at in range(len(norms))]
    usual = np.array([np.median(part) if len(part) >= USUAL // 2 else np.inf for part in before])
    return (norms > 10 * usual) & (usual > 0)


RULES = (
    *(Rule("not a number", metric, lambda _, values: ~np.isfinite(values), window=1, text=
           "{metric} is {value}: the weights may be lost. Go back to an earlier checkpoint; lower the learning rate, "
           "or train in bfloat16 or float32.") for metric in ("loss", "grad_norm")),
    Rule("gradient spike", "grad_norm", spikes, window=1, text=
         "The gradient's norm is {value:.3g}, more than ten times the usual: look at the rows of this step, lower "
         "max_grad_norm or the learning rate."),
)  # fmt: skip
RULES_WITH_REWARDS = (
    Rule("KL", "kl", lambda _, nats: nats > 1,
         "The policy is {value:.3g} nats per token away from its reference: lower the learning rate or raise beta."),
    Rule("KL", "objective/kl", lambda _, nats: nats > 50,
         "The policy is {value:.3g} nats per answer away from its reference: lower the learning rate or raise the KL "
         "coefficient."),
    Rule("clipped updates", "clip_ratio/region_mean", lambda _, share: share > 0.3,
         "{value:.0%} of the tokens are clipped: steps are too large, or rollouts too old."),
    Rule("cut answers", "completions/clipped_ratio", lambda _, share: share > 0.5,
         "{value:.0%} of the answers are cut off: raise max_completion_length, or reward shorter answers."),
    Rule("groups without variance", "frac_reward_zero_std", lambda _, share: share > 0.8,
         "In {value:.0%} of the groups all rewards are equal and teach nothing: choose easier or harder prompts."),
    Rule("stale rows", "sampling/sampling_logp_difference/mean", lambda _, nats: nats > 0.2,
         "Log-probs of sampling and of training differ by {value:.3g} nats per token: the rows are of an older or "
         "another policy."),
    Rule("repeated text", "repeated", lambda _, share: share > 0.3,
         "{value:.0%} of the answers repeat the same words: read them, the reward may be exploited."),
    Rule("equal answers", "equal", lambda _, share: share > 0.5,
         "{value:.0%} of the answers are given to other prompts too: read them, the reward may be exploited."),
    Rule("entropy collapse", "entropy", lambda first, nats: (nats < 0.5) & (nats < 0.2 * first),
         "The entropy fell from {first:.3g} to {value:.3g} nats: answers become equal. Raise epsilon_high or lower "
         "the learning rate."),
    Rule("answer length", "completions/mean_length", lambda first, n: (n > 2 * first) | (n < 0.3 * first),
         "Answers went from {first:.4g} to {value:.4g} tokens while the reward rose: the reward may prefer a length.",
         rising="reward"),
)  # fmt: skip
RULES_WITHOUT_REWARDS = (
    Rule("rising loss", "loss", lambda first, loss: loss > first + 0.2 * abs(first),
         "The loss rose from {first:.4g} to {value:.4g}: lower the learning rate, warm up, or look at the rows."),
    Rule("overfitting", "eval_loss", lambda _, loss: loss > 1.05 * np.minimum.accumulate(abs(loss)), window=1, text=
         "The loss of the evaluation set rose to {value:.3g}, more than 5 % above its least: stop earlier, keep the "
         "best checkpoint (load_best_model_at_end), or train fewer epochs."),
    Rule("likelihood displacement", "rewards/chosen", lambda first, chosen: (chosen < -1) & (chosen < first - 1),
         "The reward of chosen answers fell from {first:.3g} to {value:.3g} while the margins grew: chosen answers "
         "become less likely too. Raise beta, add the SFT loss (rpo_alpha), or leave out pairs that are nearly "
         "alike.", rising="rewards/margins"),
    Rule("accuracy of a coin", "rewards/accuracies", lambda _, share: abs(share - 0.5) < 0.05, window=USUAL, text=
         f"Over {USUAL} logs the accuracy is near {{value:.2f}}: pairs or labels may be swapped or alike, or the "
         "learning rate is too low."),
)  # fmt: skip


def signs_of(events: Sequence[Event]) -> list[Sign]:
    """The signs that the events of a run show, in the order of their steps."""
    logs, rollouts = list[Event](), Event()
    for event in events:
        if event["event"] == "rollouts":
            rollouts = event
        elif event["event"] == "log":
            values = {ALIASES.get(name) or name: value for name, value in event["values"].items()}
            logs.append(rollouts | values | {"step": event["step"]})
    rules = RULES + (RULES_WITH_REWARDS if any("reward" in log for log in logs) else RULES_WITHOUT_REWARDS)
    signs = sorted((sign for rule in rules if (sign := first_sign(rule, logs))), reverse=True)
    return sorted({sign.name: sign for sign in signs}.values())  # the first of a name


def first_sign(rule: Rule, logs: Sequence[Event]) -> Sign | None:
    """The first place where a rule holds."""
    rising = rule.rising or rule.metric
    logs = [log for log in logs if rule.metric in log and rising in log]
    if len(logs) < rule.window:
        return None
    columns = [[log[name] for log in logs] for name in (rule.metric, rising)]
    means, others = np.lib.stride_tricks.sliding_window_view(columns, rule.window, axis=1).mean(axis=2)
    shows = rule.holds(means[0], means) & (others > others[0] if rule.rising else True)
    if not shows.any():
        return None
    at = int(shows.argmax())
    text = rule.text.format(metric=rule.metric, first=means[0], value=means[at])
    return Sign(int(logs[at + rule.window - 1]["step"]), rule.name, text)


def text_signs(texts: Sequence[tuple[str, str]]) -> dict[str, float]:
    """The shares of completions that repeat most of their runs of four words, and that equal one of another prompt.

    Both count those of `LEAST_WORDS` words or more: short answers may well be equal. `texts`: prompts and completions.
    """
    prompts_of = Counter(completion for _, completion in set(texts))
    repeated = equal = 0
    for _, completion in texts:
        words = completion[:LONGEST_TEXT].split()
        runs = [*zip(words, words[1:], words[2:], words[3:], strict=False)]
        if len(words) >= LEAST_WORDS:
            repeated += len(runs) > 2 * len(set(runs))
            equal += prompts_of[completion] > 1
    count = max(len(texts), 1)
    return {"repeated": repeated / count, "equal": equal / count}
