"""Judges that need no model: of each kind one whose answers can be worked out by hand."""

from trl.experimental.judges import BaseBinaryJudge, BasePairwiseJudge, BaseRankJudge


class IsLong(BaseBinaryJudge):
    """Whether a completion is longer than its right answer, or than three characters; no answer to empty ones."""

    def judge(self, prompts, completions, gold_completions=None, shuffle_order=True):
        golds = ["abc"] * len(prompts) if gold_completions is None else gold_completions
        return [-1 if not text else int(len(text) > len(gold)) for text, gold in zip(completions, golds, strict=True)]


class Longer(BasePairwiseJudge):
    """The longer of two; no answer where both are as long. It notes what it is asked."""

    def __init__(self):
        self.asked = []

    def judge(self, prompts, completions, shuffle_order=True):
        self.asked += list(zip(prompts, completions, strict=True))
        return [-1 if len(a) == len(b) else int(len(b) > len(a)) for a, b in completions]


class LongestFirst(BaseRankJudge):
    """The longest first, the earlier one of two that are as long."""

    def judge(self, prompts, completions, shuffle_order=True):
        return [sorted(range(len(texts)), key=lambda i: -len(texts[i])) for texts in completions]
