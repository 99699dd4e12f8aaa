"""How often a judge prefers the model to what it was before, measured at the start and at each evaluation."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from transformers import GenerationConfig, Trainer, TrainerState, TrainingArguments

from trl.checkpoints.progress import SavesState, on_main
from trl.reporting.tables import print_rich_table
from trl.reporting.win_rate import win_rate, win_shares
from trl.rewards.judge_source import as_text
from trl.rewards.judges import BasePairwiseJudge
from trl.rewards.managed_judge import ManagedJudge
from trl.trainer.samples import Sample, evaluation_rows, sample_completions, send_table

logger = logging.getLogger(__name__)


class WinRateCallback(SavesState):
    """Lets a judge compare completions of evaluation prompts with a reference's, at step 0 and at each evaluation.

    Args:
        judge: a `BasePairwiseJudge`; a `ManagedJudge` has a cache, both orders (`eval_win_rate_agreement`) and a
            budget.
        trainer: whose `eval_dataset` (its first `num_prompts` rows) is completed.
        generation_config: of both; None for the models' own, with 128 new tokens if they set no limit.
        shuffle_order: show some pairs in reverse order.
        use_soft_judge: the judge gives probabilities (`return_scores`), whose mean is `eval_avg_win_prob`.
        against: completions to compare with, one for each prompt. None: those of the trainer's reference, or without
            one of the model before training, which checkpoints keep.

    Logs `eval_win_rate` (ties count as half), the ends of its 95 % interval `eval_win_rate_low` and
    `eval_win_rate_high`, and `eval_win_rate_unanswered`, the share of pairs without an answer, which count nowhere. A
    table `win_rate_completions` goes to the trackers.

    Raises: TypeError for what is no judge, and for `use_soft_judge` with a judge without probabilities; ValueError for
    an evaluation set without prompts, and for another number of completions in `against`.

    Example:
        >>> trainer.add_callback(WinRateCallback(judge, trainer, num_prompts=100))  # doctest: +SKIP
    """

    state_file = "win_rate_reference.json"

    def __init__(
        self, judge: BasePairwiseJudge, trainer: Trainer, generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None, shuffle_order: bool = True, use_soft_judge: bool = False, *,
        against: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        if not hasattr(judge, "judge"):
            raise TypeError(f"judge must be a BasePairwiseJudge, got {judge!r}.")
        self.judge, self.trainer, self.generation_config = judge, trainer, generation_config
        self.options = {"shuffle_order": shuffle_order, **({"return_scores": True} if use_soft_judge else {})}
        inner = judge.inner if isinstance(judge, ManagedJudge) else judge
        win_shares(inner, [], [], **self.options)  # raises for a judge without scores
        self.rows = evaluation_rows(trainer, num_prompts, "WinRateCallback")
        self.against: list[str] | None = None if against is None else list(against)
        if self.against is not None and len(self.against) != len(self.rows):
            raise ValueError(
                f"against has {len(self.against)} completions for {len(self.rows)} prompts. Give one for each prompt."
            )
        self.table: list[dict[str, object]] = []

    def on_train_begin(self, args, state, control, **kwargs):
        samples = self._find_reference(args, state)
        if not state.global_step and not args.eval_on_start:
            self._measure(state.global_step, samples)

    def _find_reference(self, args: TrainingArguments, state: TrainerState) -> list[Sample] | None:
        """Set `against`; the policy's own completions, where they are what later ones are compared with."""
        reference = getattr(self.trainer, "reference", None)
        if self.against is not None:
            return None
        if state.global_step and reference is None:
            if (kept := self.resumed_file(args, state)).is_file():
                self.against = json.loads(kept.read_text())
                return None
            logger.warning(
                "the checkpoint has no %s: win rates are against the resumed model. Pass against=.", self.state_file
            )
        samples = sample_completions(self.trainer, self.rows, self.generation_config, reference=reference)
        self.against = [sample.completion for sample in samples]
        return samples if reference is None else None

    def save_state(self, folder: Path) -> None:
        """Write what is compared with into a checkpoint."""
        if self.trainer.accelerator.is_main_process:
            (folder / self.state_file).write_text(json.dumps(self.against))

    def on_evaluate(self, args, state, control, **kwargs):
        self._measure(state.global_step, self._find_reference(args, state))  # before training: both at once

    def _measure(self, step: int, samples: list[Sample] | None) -> None:
        """Log how the policy's completions, new ones unless passed, compare with `against`."""
        samples = samples or sample_completions(self.trainer, self.rows, self.generation_config)
        self.trainer.log(on_main(self.trainer.accelerator, lambda: self._metrics(self._judged(step, samples))))

    def _judged(self, step: int, samples: list[Sample]) -> list[float | None]:
        rows = zip(self.rows, samples, strict=True)
        prompts = [as_text(row["prompt"]) if "prompt" in row else sample.prompt for row, sample in rows]
        pairs = [list(pair) for pair in zip(self.against or [], (s.completion for s in samples), strict=True)]
        shares = win_shares(self.judge, prompts, pairs, **self.options)
        self._report(prompts, pairs, shares, step)
        return shares

    def _metrics(self, shares: list[float | None]) -> dict[str, float]:
        wins = [None if share is None else 0.5 if share == 0.5 else float(share > 0.5) for share in shares]
        rate = win_rate(wins)
        logs = {"": rate.rate, "_low": rate.low, "_high": rate.high, "_unanswered": rate.unanswered / len(shares)}
        agreement = self.judge.agreement() if isinstance(self.judge, ManagedJudge) else {}
        logs |= {f"_{name.rpartition('/')[2]}": share.mean.item() for name, share in agreement.items()}
        metrics = {f"eval_win_rate{name}": value for name, value in logs.items()}
        return metrics | ({"eval_avg_win_prob": win_rate(shares).rate} if "return_scores" in self.options else {})

    def _report(self, prompts: list[str], pairs: list[list[str]], shares: list[float | None], step: int) -> None:
        new = [
            {
                "step": step,
                "prompt": prompt,
                "reference_model": first,
                "policy": second,
                "winner_index": None if share in (None, 0.5) else int(share > 0.5),
            }
            for prompt, (first, second), share in zip(prompts, pairs, shares, strict=True)
        ]
        self.table += new
        if not send_table(self.trainer, "win_rate_completions", pd.DataFrame(self.table), has_all_steps=True):
            print_rich_table(pd.DataFrame(new))
