"""A small model learns to add from comparisons of its own answers: Online DPO, Nash-MD or XPO.

    python examples/online_preferences.py --method online_dpo nash_md xpo --seed 0

is `arithmetic_rl.py` with a judge in place of a reward: of two answers to a sum it prefers the right one, and the shorter one if
both are right or both wrong. The model is fine-tuned until it answers three training sums in five, and is then the reference of the
three methods. A run ends when it answers nine of ten unseen sums at two looks in a row, at the latest after `--steps`. `--out` and
`--table` are those of `arithmetic_rl.py`; nothing is downloaded.
"""

import re
import sys
from pathlib import Path
from typing import Any

from trl import NashMDConfig, NashMDTrainer, OnlineDPOConfig, OnlineDPOTrainer, XPOConfig, XPOTrainer
from trl.experimental.judges import BasePairwiseJudge

sys.path.append(str(Path(__file__).parent))
from arithmetic_rl import Method, main


class RightThenShorter(BasePairwiseJudge):
    """Prefers the right sum, then the shorter answer; others are a tie."""

    def judge(
        self,
        prompts: list[str],
        completions: list[list[str]],
        shuffle_order: bool = True,
        return_scores: bool = False,
    ) -> list[Any]:
        """0 if the first is better, 1 if the second is, -1 for a tie; with `return_scores` 1.0, 0.0 and 0.5."""
        answers = []
        for prompt, pair in zip(prompts, completions, strict=True):
            right = str(sum(map(int, re.findall(r"\d+", prompt))))
            first, second = ((text.strip() != right, len(text.strip())) for text in pair)
            answers.append(-1 if first == second else int(second < first))
        return [{0: 1.0, 1: 0.0, -1: 0.5}[answer] for answer in answers] if return_scores else answers


JUDGED = {"judge": RightThenShorter()}
COMPARING: dict[str, Any] = {
    "per_device_train_batch_size": 64, "num_generations": 2, "steps_per_generation": None, "logging_steps": 40, "temperature": 1.0,
}  # fmt: skip
ONLINE_DPO: dict[str, Any] = {
    **COMPARING, "per_device_train_batch_size": 16, "num_generations": 8, "pair_selection": "all", "beta": 0.5,
}  # fmt: skip
NASH_MD: dict[str, Any] = {**COMPARING, "mixture_coef": 0.25, "beta": 0.05, "learning_rate": 3e-4}
XPO: dict[str, Any] = {**COMPARING, "alpha": 1e-4, "beta": 0.5}
LOOKS = 2
METHODS = {
    "online_dpo": Method(OnlineDPOTrainer, OnlineDPOConfig, JUDGED, ONLINE_DPO, "rewards/accuracies", LOOKS),
    "nash_md": Method(NashMDTrainer, NashMDConfig, JUDGED, NASH_MD, "rewards/probabilities", LOOKS),
    "xpo": Method(XPOTrainer, XPOConfig, JUDGED, XPO, "rewards/accuracies", LOOKS),
}
ENOUGH, STEPS = 0.6, 3200

if __name__ == "__main__":
    main(METHODS, __doc__, enough=ENOUGH, steps=STEPS)
