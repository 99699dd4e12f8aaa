"""What the recorded runs of GKD did otherwise: no temperature in the loss, and the first completion tokens of some rows lost.

The reference cuts rows, padded on the left to their whole length, at the padded length of the prompts: a row with a short
prompt loses the first tokens of a completion that reaches further to the left. With both, ours gives its numbers.
"""

import pytest

from tests.golden.test_group_deviations import assert_recorded, assets, cases, rerun  # noqa: F401
from trl import GKDTrainer

CASES = [
    "beta_0.0",
    "beta_0.5",
    "beta_1.0",
    "beta_0.1",
    "temperature",
    "multiturn",
    "multiturn_beta0",
    "truncated",
    "shuffled",
    "eval",
]


def losing(collate):
    def collated(rows):
        prompts = [len(row["input_ids"]) - sum(row["completion_mask"]) for row in rows]
        longest = max(len(row["input_ids"]) for row in rows)
        changed = []
        for row, prompt in zip(rows, prompts, strict=True):
            lost = max(0, max(prompts) - (longest - sum(row["completion_mask"])))
            mask = [0] * (prompt + lost) + [1] * (sum(row["completion_mask"]) - lost)
            changed.append({**row, "completion_mask": mask})
        return collate(changed)

    return collated


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_recorded_gkd_is_ours_at_temperature_1_without_the_lost_tokens(assets, cases, monkeypatch, case):  # noqa: F811
    make, recorded = GKDTrainer.make_collator, cases[f"gkd/{case}"]
    monkeypatch.setattr(GKDTrainer, "make_collator", lambda self, args: losing(make(self, args)))
    steps = rerun(assets, recorded, temperature=1.0)
    assert_recorded(steps, recorded["result"]["steps"], leave_out=("loss",))
