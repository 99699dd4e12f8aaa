"""Signs in the logs of a run that something is wrong. The thresholds are rules of thumb, listed in `docs/guides/report.md`."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

WINDOW = 3  # logs over which a mean is taken
USUAL = 20  # logs whose median gradient is the usual one, and after which an accuracy of 0.5 counts as stuck
LONGEST_TEXT = 4_000  # characters of a completion that are searched for repetitions
LEAST_WORDS = 20  # of a completion that may count as repeated
Logs = Mapping[str, Any]


class Level(NamedTuple):
    """A metric of the last logs that is above a bound."""

    name: str
    metrics: tuple[str, ...]
    bound: float
    text: str


class Change(NamedTuple):
    """A metric that is `factor` times its first value, above (factor > 1) or below it; `bound`: also below that.

    `with_reward`: while the reward rises.
    """

    name: str
    metric: str
    factor: float
    text: str
    bound: float = float("inf")
    with_reward: bool = True


REWARDS = ("reward", "reward_mean", "objective/scores")
ACCURACIES = ("rewards/accuracies", "accuracy")
SPIKE, OVERFIT = 10.0, 1.05  # times the usual norm, and the least loss
COIN = 0.05  # from 0.5
DISPLACED = 1.0  # the chosen reward below its first value, and below 0
LEVELS = (
    Level("KL", ("kl",), 1.0, "The policy is {value:.3g} nats per token away from its reference: lower the learning rate or raise beta."),
    Level("KL", ("objective/kl",), 50.0, "The policy is {value:.3g} nats per answer away from its reference: lower the learning rate or raise the KL coefficient."),
    Level("clipped updates", ("clip_ratio/region_mean", "policy/clipfrac_avg"), 0.3, "{value:.0%} of the tokens are clipped: steps are too large, or rollouts too old."),
    Level("cut answers", ("completions/clipped_ratio",), 0.5, "{value:.0%} of the answers are cut off: raise max_completion_length, or reward shorter answers."),
    Level("groups without variance", ("frac_reward_zero_std",), 0.8, "In {value:.0%} of the groups all rewards are equal and teach nothing: choose easier or harder prompts."),
    Level("stale rows", ("sampling/sampling_logp_difference/mean",), 0.2, "Log-probs of sampling and of training differ by {value:.3g} nats per token: the rows are of an older or another policy."),
    Level("repeated text", ("repeated",), 0.3, "{value:.0%} of the answers repeat the same words: read them, the reward may be exploited."),
    Level("equal answers", ("equal",), 0.5, "{value:.0%} of the answers are given to other prompts too: read them, the reward may be exploited."),
)  # fmt: skip
CHANGES = (
    Change("entropy collapse", "entropy", 0.2, "The entropy fell from {first:.3g} to {value:.3g} nats: answers become equal. Raise epsilon_high or lower the learning rate.", 0.5, with_reward=False),
    Change("longer answers", "completions/mean_length", 2.0, "Answers grew from {first:.4g} to {value:.4g} tokens while the reward rose: the reward may prefer length."),
    Change("shorter answers", "completions/mean_length", 0.3, "Answers fell from {first:.4g} to {value:.4g} tokens while the reward rose: the reward may prefer short ones."),
)  # fmt: skip

LOSSES = (
    Change("rising loss", "loss", 1.2, "The loss rose from {first:.4g} to {value:.4g}: lower the learning rate, warm up, or look at the rows.", with_reward=False),
)  # fmt: skip
SENTENCES = {
    "not a number": "{metric} is {value}: the weights may be lost. Go back to an earlier checkpoint; lower the learning rate, or train in bfloat16 or float32.",
    "gradient spike": "The gradient's norm is {value:.3g}, {times:.0f} times the usual: look at the rows of this step, lower max_grad_norm or the learning rate.",
    "accuracy of a coin": "Over {logs} logs the accuracy is {value:.2f}: pairs or labels may be swapped or alike, or the learning rate is too low.",
    "likelihood displacement": "The reward of chosen answers fell from {first:.3g} to {value:.3g} while the margins grew: chosen answers become less likely too. Raise beta, add the SFT loss (rpo_alpha), or leave out pairs that are nearly alike.",
    "overfitting": "The loss of the evaluation set rose from {first:.3g} to {value:.3g} while that of training fell: stop earlier, keep the best checkpoint (load_best_model_at_end), or train fewer epochs.",
}  # fmt: skip


class RunChecks:
    """Reads the logs of a run in order; says of each fault once what it is."""

    def __init__(self, fired: Iterable[str] = ()) -> None:
        self.fired = set(fired)
        self._first: list[Logs] = []
        self._last: deque[Logs] = deque(maxlen=WINDOW)
        self._usual: deque[Logs] = deque(maxlen=USUAL)
        self._least: tuple[float, float | None] | None = None  # loss of the evaluation set, and of training then

    def read(self, logs: Logs) -> dict[str, str]:
        """The faults that this log shows for the first time: names and sentences."""
        has_rewards = any(name in logs for name in REWARDS)
        faults = dict[str, str]()
        if "eval_loss" in logs:
            faults = self._of_evaluation(float(logs["eval_loss"]))
        elif "loss" in logs or has_rewards:
            if len(self._first) < WINDOW:
                self._first.append(logs)
            self._last.append(logs)
            faults = self._of_numbers(logs)
            if self._first[-1] is not self._last[0] and len(self._last) == WINDOW:
                faults |= self._of_changes(has_rewards=has_rewards)
            if has_rewards and len(self._last) == WINDOW:
                faults |= self._of_levels()
            self._usual.append(logs)
        new = {name: text for name, text in faults.items() if name not in self.fired}
        self.fired |= new.keys()
        return new

    def _of_numbers(self, logs: Logs) -> dict[str, str]:
        """What this log shows beside the usual ones."""
        faults: dict[str, str] = {}
        for name in ("loss", "grad_norm"):
            if isinstance(value := logs.get(name), float) and not math.isfinite(value):
                faults |= _fault("not a number", metric=name, value=value)
        norm, norms = logs.get("grad_norm"), [entry.get("grad_norm") for entry in self._usual]
        usual = median([value for value in norms if isinstance(value, int | float)] or [0.0])
        if isinstance(norm, int | float) and len(norms) >= USUAL // 2 and norm > SPIKE * usual > 0:
            faults |= _fault("gradient spike", value=norm, times=norm / usual)
        for name in ACCURACIES if len(self._usual) == USUAL else ():
            value, last = mean(self._usual, name), mean(self._last, name)
            if value is not None and last is not None and max(abs(value - 0.5), abs(last - 0.5)) < COIN:
                faults |= _fault("accuracy of a coin", value=value, logs=USUAL)
        return faults

    def _of_levels(self) -> dict[str, str]:
        faults: dict[str, str] = {}
        for rule in LEVELS:
            values = [mean(self._last, name) for name in rule.metrics]
            worst = max((value for value in values if value is not None), default=0.0)
            if worst > rule.bound:
                faults.setdefault(rule.name, rule.text.format(value=worst))
        return faults

    def _of_changes(self, *, has_rewards: bool) -> dict[str, str]:
        """What the last logs show beside the first."""
        faults: dict[str, str] = {}
        for rule in CHANGES if has_rewards else LOSSES:
            first, value = mean(self._first, rule.metric), mean(self._last, rule.metric)
            if first is None or value is None or (rule.with_reward and not self._rises(*REWARDS)):
                continue
            is_far = value > first * rule.factor if rule.factor > 1 else value < first * rule.factor
            if is_far and value < rule.bound:
                faults.setdefault(rule.name, rule.text.format(first=first, value=value))
        chosen, first_chosen = (mean(logs, "rewards/chosen") for logs in (self._last, self._first))
        is_lower = chosen is not None and first_chosen is not None and chosen < min(first_chosen, 0.0) - DISPLACED
        if is_lower and self._rises("rewards/margins"):
            faults |= _fault("likelihood displacement", first=first_chosen, value=chosen)
        return faults

    def _of_evaluation(self, value: float) -> dict[str, str]:
        trained = mean(self._last, "loss")
        if self._least is None or value < self._least[0]:
            self._least = value, trained
        least, before = self._least
        if trained is None or before is None or trained >= before or value < OVERFIT * least:
            return {}
        return _fault("overfitting", first=least, value=value)

    def _rises(self, *names: str) -> bool:
        pairs = [(mean(self._first, name), mean(self._last, name)) for name in names]
        return any(first is not None and last is not None and last > first for first, last in pairs)


def _fault(name: str, **values: object) -> dict[str, str]:
    return {name: SENTENCES[name].format(**values)}


def mean(logs: Iterable[Logs], name: str) -> float | None:
    """Of the numbers of a metric; None where a log lacks it."""
    values = [entry.get(name) for entry in logs]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None


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
