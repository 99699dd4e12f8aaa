"""What preparing pairs of preferences did to their rows: counts, the first rows behind them, and which rows stay."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trl.data.preference_lengths import PairLengths
from trl.data.row_counters import Numbers, RowReport
from trl.data.validation import Place


@dataclass
class PairReport(RowReport):
    """Counts of one data set of preferences; `tokens` counts a prompt once."""

    repeated_prompts: int = 0
    for_reward: bool = False

    def phrases(self) -> Mapping[str, str]:
        return {**super().phrases(), **_PHRASES, **(_REWARD_PHRASES if self.for_reward else {})}

    def warnings(self) -> Mapping[str, str]:
        return {**super().warnings(), **_WARNINGS, **(_REWARD_WARNINGS if self.for_reward else {})}


_PHRASES = {
    "untrained_rows": "{0.untrained_rows} with a completion cut off whole",
    "equal_rows": "{0.equal_rows} with equal completions",
    "promptless_rows": "{0.promptless_rows} with no prompt left",
    "empty_completions": "{0.empty_completions} with a completion of the eos token alone",
    "repeated_prompts": "{0.repeated_prompts} whose answers repeated the prompt",
}
_WARNINGS = {
    "untrained_rows": (
        "in {0.untrained_rows} of {0.rows} rows (first: {0.first[untrained_rows]}) truncation left no token of a completion; "
        "{0.dropped_rows} of them were left out. Raise max_length, lower max_prompt_length, or filter these rows."
    ),
    "equal_rows": (
        "in {0.equal_rows} of {0.rows} rows (first: {0.first[equal_rows]}) the chosen and the rejected completion are equal, "
        "so they show no preference. Filter these rows, or raise the lengths if truncation made them equal."
    ),
    "promptless_rows": (
        "in {0.promptless_rows} of {0.rows} rows (first: {0.first[promptless_rows]}) no token of the prompt is left, and the "
        "completion's first token is not trained. Give prompts, or where they were cut off raise max_length or lower "
        "max_completion_length."
    ),
    "empty_completions": (
        "in {0.empty_completions} of {0.rows} rows (first: {0.first[empty_completions]}) one answer is what the other one "
        "continues; its completion is the eos token alone. Give the prompts in a column 'prompt' if that is not meant."
    ),
    "repeated_prompts": (
        "in {0.repeated_prompts} of {0.rows} rows (first: {0.first[repeated_prompts]}) 'chosen' and 'rejected' begin with the "
        "messages of 'prompt', which were taken off. Give the answers only, or remove the column 'prompt'."
    ),
}
_REWARD_PHRASES = {"untrained_rows": "{0.untrained_rows} longer than max_length"}
_REWARD_WARNINGS = {
    "untrained_rows": (
        "{0.untrained_rows} of {0.rows} rows (first: {0.first[untrained_rows]}) have a sequence of more than max_length "
        "tokens; {0.dropped_rows} of them were left out. Raise max_length to train on them."
    ),
}

_FLAGS = ("equal_rows", "promptless_rows", "empty_completions", "repeated_prompts")


@dataclass
class PairCounting:
    """Sums the numbers of `RowCounts` into the report; `is_strict` refuses rows that lose a completion or the prompt."""

    report: PairReport
    lengths: PairLengths
    is_strict: bool = False

    def tally(self, numbers: Numbers, *, first_row: int, is_whole: bool) -> np.ndarray:
        """Positions of the rows to keep.

        Raises: ValueError where a row is refused, or nothing of a whole data set would be kept.
        """
        left_out, rows = numbers["left_out"] > 0, numbers["row"]
        bad = left_out | (numbers["promptless_rows"] > 0)
        if self.is_strict and bad.any():
            raise ValueError(self._complaint(int(rows[bad][0]), is_left_out=bool(left_out[bad][0])))
        if is_whole and left_out.all():
            read = (
                f"The first {len(rows)} rows are all"
                if self.report.is_streaming
                else f"All {len(rows)} rows are"
            )
            raise ValueError(f"{self._complaint(int(rows[0]), is_left_out=True)} {read} like this.")
        self.report.take(numbers, left_out=left_out, flags=_FLAGS)
        return np.flatnonzero(~left_out)

    def _complaint(self, row: int, *, is_left_out: bool) -> str:
        place = Place(self.report.dataset_name, row, "chosen_input_ids")
        limit = self.lengths.max_length
        if self.report.for_reward:
            return (
                f"{place}: this sequence or the one in 'rejected_input_ids' has more than max_length {limit} tokens, expected "
                "at most as many. Raise max_length, or filter the row out."
            )
        if not is_left_out:
            return (
                f"{place}: no token of the prompt is left before it or the one in 'rejected_input_ids' (max_length {limit}), "
                "expected at least one. Raise max_length, lower max_completion_length, or filter the row out."
            )
        return (
            f"{place}: truncation to {self.lengths} leaves no token of this completion or of the one in "
            "'rejected_input_ids', expected at least one of each. Raise max_length, lower max_prompt_length, or filter "
            "the row out."
        )
