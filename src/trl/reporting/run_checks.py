"""Signs in the logs of a run that something is wrong. The thresholds are rules of thumb (docs/guides/report.md)."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

WINDOW = 3  # logs over which a mean is taken
USUAL = 20  # logs whose median gradient is the usual one, and after which an accuracy of 0.5 counts as stuck
LONGEST_TEXT = 4_000  # characters of a completion that are searched for repetitions
LEAST_WORDS = 20  # of a completion that may count as repeated
REWARDS = ("reward", "reward_mean", "objective/scores")
SPIKE, OVERFIT = 10.0, 1.05  # times the usual norm, and the least loss
Logs = Mapping[str, Any]


class Rule(NamedTuple):
    """A metric of the last logs that is between two bounds, in runs with or without rewards.

    `factor`, `drop`: beyond `factor` times its first value less `drop` too, above it (factor > 1) or below; `rising`:
    while one of these metrics rises; `usual`: the mean over `USUAL` logs before is between the bounds too.
    """

    name: str
    metric: str
    text: str
    above: float = -math.inf
    below: float = math.inf
    factor: float | None = None
    drop: float = 0.0
    rising: tuple[str, ...] = ()
    usual: bool = False
    has_rewards: bool = True


CLIPPED = "{value:.0%} of the tokens are clipped: steps are too large, or rollouts too old."
COIN = (
    f"Over {USUAL} logs the accuracy is near {{value:.2f}}: pairs or labels may be swapped or alike, or the learning "
    "rate is too low."
)
RULES = (
    Rule("KL", "kl", above=1.0, text=
         "The policy is {value:.3g} nats per token away from its reference: lower the learning rate or raise beta."),
    Rule("KL", "objective/kl", above=50.0, text=
         "The policy is {value:.3g} nats per answer away from its reference: lower the learning rate or raise the KL "
         "coefficient."),
    Rule("clipped updates", "clip_ratio/region_mean", CLIPPED, above=0.3),
    Rule("clipped updates", "policy/clipfrac_avg", CLIPPED, above=0.3),
    Rule("cut answers", "completions/clipped_ratio", above=0.5, text=
         "{value:.0%} of the answers are cut off: raise max_completion_length, or reward shorter answers."),
    Rule("groups without variance", "frac_reward_zero_std", above=0.8, text=
         "In {value:.0%} of the groups all rewards are equal and teach nothing: choose easier or harder prompts."),
    Rule("stale rows", "sampling/sampling_logp_difference/mean", above=0.2, text=
         "Log-probs of sampling and of training differ by {value:.3g} nats per token: the rows are of an older or "
         "another policy."),
    Rule("repeated text", "repeated", above=0.3, text=
         "{value:.0%} of the answers repeat the same words: read them, the reward may be exploited."),
    Rule("equal answers", "equal", above=0.5, text=
         "{value:.0%} of the answers are given to other prompts too: read them, the reward may be exploited."),
    Rule("entropy collapse", "entropy", below=0.5, factor=0.2, text=
         "The entropy fell from {first:.3g} to {value:.3g} nats: answers become equal. Raise epsilon_high or lower "
         "the learning rate."),
    Rule("longer answers", "completions/mean_length", factor=2.0, rising=REWARDS, text=
         "Answers grew from {first:.4g} to {value:.4g} tokens while the reward rose: the reward may prefer length."),
    Rule("shorter answers", "completions/mean_length", factor=0.3, rising=REWARDS, text=
         "Answers fell from {first:.4g} to {value:.4g} tokens while the reward rose: the reward may prefer short."),
    Rule("rising loss", "loss", factor=1.2, has_rewards=False, text=
         "The loss rose from {first:.4g} to {value:.4g}: lower the learning rate, warm up, or look at the rows."),
    Rule("likelihood displacement", "rewards/chosen", below=-1.0, factor=1.0, drop=1.0, rising=("rewards/margins",),
         has_rewards=False, text=
         "The reward of chosen answers fell from {first:.3g} to {value:.3g} while the margins grew: chosen answers "
         "become less likely too. Raise beta, add the SFT loss (rpo_alpha), or leave out pairs that are nearly "
         "alike."),
    Rule("accuracy of a coin", "rewards/accuracies", COIN, above=0.45, below=0.55, usual=True, has_rewards=False),
    Rule("accuracy of a coin", "accuracy", COIN, above=0.45, below=0.55, usual=True, has_rewards=False),
)  # fmt: skip


class RunChecks:
    """Reads the logs of a run in order, and returns the sentence of each sign once."""

    def __init__(self, fired: Iterable[str] = ()) -> None:
        self.fired = set(fired)
        self._first: list[Logs] = []
        self._logs: deque[Logs] = deque(maxlen=USUAL + 1)  # the newest
        self._least: tuple[float, float] | None = None  # loss of the evaluation set, and of training then

    def read(self, logs: Logs) -> dict[str, str]:
        """The signs that this log shows for the first time: names and sentences."""
        has_rewards = any(name in logs for name in REWARDS)
        signs = dict[str, str]()
        if "eval_loss" in logs:
            signs = self._of_evaluation(float(logs["eval_loss"]))
        elif "loss" in logs or has_rewards:
            self._first = [*self._first, logs][:WINDOW]
            self._logs.append(logs)
            signs = self._of_numbers(logs)
            for rule in RULES if len(self._logs) >= WINDOW else ():
                first, value = self._change(rule.metric)
                if rule.has_rewards == has_rewards and self._holds(rule, first, value):
                    signs.setdefault(rule.name, rule.text.format(first=first, value=value))
        new = {name: text for name, text in signs.items() if name not in self.fired}
        self.fired |= new.keys()
        return new

    def _change(self, name: str) -> tuple[float, float]:
        """The first and the last mean of a metric."""
        return mean(self._first, name), mean([*self._logs][-WINDOW:], name)

    def _of_numbers(self, logs: Logs) -> dict[str, str]:
        """The signs in this log beside the usual ones before it."""
        signs = dict[str, str]()
        for name in ("loss", "grad_norm"):
            if isinstance(value := logs.get(name), float) and not math.isfinite(value):
                signs["not a number"] = (
                    f"{name} is {value}: the weights may be lost. Go back to an earlier checkpoint; lower the learning "
                    "rate, or train in bfloat16 or float32."
                )
        norm, *norms = (number(entry, "grad_norm") for entry in [logs, *[*self._logs][:-1]])
        usual = median([norm for norm in norms if norm == norm] or [0.0])
        if len(norms) >= USUAL // 2 and norm > SPIKE * usual > 0:
            signs["gradient spike"] = (
                f"The gradient's norm is {norm:.3g}, {norm / usual:.0f} times the usual: look at the rows of this "
                "step, lower max_grad_norm or the learning rate."
            )
        return signs

    def _holds(self, rule: Rule, first: float, value: float) -> bool:
        """Whether a metric with these means shows the sign; those that are not known (NaN) show none."""
        values = [value, mean([*self._logs][:-1], rule.metric)] if rule.usual else [value]
        if not all(rule.above < value <= rule.below for value in values) or (rule.usual and len(self._logs) <= USUAL):
            return False
        bound = first * (rule.factor or 0.0) - rule.drop
        if rule.factor is not None and not (value > bound if rule.factor > 1 else value < bound):
            return False
        return not rule.rising or any(first < last for first, last in map(self._change, rule.rising))

    def _of_evaluation(self, value: float) -> dict[str, str]:
        trained = self._change("loss")[1]
        if self._least is None or value < self._least[0]:
            self._least = value, trained
        least, before = self._least
        if not (trained < before and value >= OVERFIT * least):
            return {}
        return {
            "overfitting": f"The loss of the evaluation set rose from {least:.3g} to {value:.3g} and that of training "
            "fell: stop earlier, keep the best checkpoint (load_best_model_at_end), or train fewer epochs."
        }


def number(logs: Logs, name: str) -> float:
    """The value of a metric; NaN where a log has none."""
    value = logs.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def mean(logs: Sequence[Logs], name: str) -> float:
    """The mean of a metric; NaN where a log lacks it."""
    return sum(number(entry, name) for entry in logs) / len(logs) if logs else math.nan


def repeats_itself(text: str) -> bool:
    """Whether more than half of the runs of four words of a text of `LEAST_WORDS` words or more stood there before.

    >>> repeats_itself("so it is " * 20), repeats_itself(" ".join(map(str, range(40))))
    (True, False)
    """
    words = text[:LONGEST_TEXT].split()
    if len(words) < LEAST_WORDS:
        return False
    runs = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
    return sum(runs.values()) > 2 * len(runs)


def text_signs(prompts: Sequence[str], completions: Sequence[str]) -> dict[str, float]:
    """The share of completions that repeat themselves, and of those that equal one of another prompt.

    Short answers (of fewer than `LEAST_WORDS` words) may well be equal, so only long ones count as such.
    """
    prompts_of: dict[str, set[str]] = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        prompts_of.setdefault(completion, set()).add(prompt)
    shared = [len(prompts_of[text]) > 1 and len(text.split()) >= LEAST_WORDS for text in completions]
    count = max(len(completions), 1)
    return {"repeated": sum(map(repeats_itself, completions)) / count, "equal": sum(shared) / count}
