"""What the trainers of preferences share: terms of several kinds, each divided by its own count over the step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from trl.collators.preference import PairCollator, as_pair_batch
from trl.data.formats import by_name
from trl.data.prepared_sets import DataSets
from trl.methods.method import Batch, Method
from trl.models.policy import Policy
from trl.models.reference import Reference
from trl.models.scoring.base import shares_prefix
from trl.models.setup import pad_token_id
from trl.trainer.arguments import Collator
from trl.trainer.base_trainer import BaseTrainer
from trl.trainer.callbacks.sync_ref_model import move_reference
from trl.trainer.precompute import ReferencePass, has_reference_columns, precompute_ref_log_probs
from trl.trainer.row_sets import pair_sets
from trl.trainer.samples import log_evaluation_samples


@dataclass(frozen=True)
class Parts:
    """What a trainer of judged completions is made of, before transformers' constructor has the accelerator.

    `layout` brings batches, perhaps of a user's own collator, into the form that the method works on.
    """

    policy: Policy
    method: Method
    sets: DataSets
    collator: Collator
    layout: Callable[[Any], Batch]
    shares_prefix: bool = False
    reference: Reference | None = None


def pair_parts(
    args: Any, policy: Policy, method: Method, collator: Collator | None, sets: DataSets | None = None, **settings: Any
) -> Parts:
    """The parts of a trainer of pairs; `settings` are further ones of `PreferencePreparation`, without other `sets`."""
    shares = shares_prefix(policy.scorer, args.prefix_sharing)
    encoder_pad = pad_token_id(policy.tokenizer) if policy.scorer.core.config.is_encoder_decoder else None
    layout = partial(as_pair_batch, prefix_sharing=shares)
    sets = sets or pair_sets(args, policy, **settings)
    return Parts(policy, method, sets, collator or PairCollator(shares, encoder_pad), layout, shares)


class PreferenceTrainer(BaseTrainer):
    """Base of the trainers that learn from judged completions."""

    shares_tokens: ClassVar[bool] = True
    reference: "Reference | AskedInAdvance | None" = None
    shares_prefix: bool = False

    def __init__(self, parts: Parts, args: Any, **others: Any) -> None:
        """`others` are further arguments of `BaseTrainer`."""
        self.method, self.layout = parts.method, parts.layout
        self.reference, self.shares_prefix = parts.reference, parts.shares_prefix
        super().__init__(
            model=parts.policy.model, args=args, sets=parts.sets, data_collator=parts.collator,
            processing_class=parts.policy.processing_class, **others,
        )  # fmt: skip

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate; with `generate_during_eval` show what policy and reference make of some prompts first."""
        if getattr(self.args, "generate_during_eval", False):
            log_evaluation_samples(self, dataloader.dataset, prefix=metric_key_prefix)
        return super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    # ---- the reference

    def reference_logps(self, batch: Batch) -> Tensor:
        """Log-prob of each completion of a batch under the reference, `(S,)`."""
        policy: Any = self.model_wrapped
        assert self.reference is not None
        with self.accelerator.autocast():
            scored = self.reference.score(policy, batch, lambda scorer, model, rows: scorer.score(model, rows))
        return self.method.totals(batch, scored)  # type: ignore[attr-defined]

    def take_reference(self, columns: Sequence[str], **settings: object) -> None:
        """Bring the reference to the device, at the end of the constructor, perhaps for a callback to move.

        With `precompute_ref_log_probs` its log-probs of all rows are computed now; they depend on the `settings`.

        Raises: ValueError for rows that have some of its `columns`, or have them although the reference changes.
        """
        if self.reference is None or isinstance(self.reference, AskedInAdvance):
            return
        self._moved_reference = move_reference(self)
        evaluation = by_name(self.eval_dataset)
        for name, part in {**evaluation, "train": self.train_dataset}.items():
            has_columns = part is not None and has_reference_columns(part, columns, name)
            if has_columns and self._moved_reference is not None:
                raise ValueError(
                    f"the {name} dataset has the reference's log-probabilities, columns {list(columns)}, but the "
                    "reference changes "
                    "in training (sync_ref_model, or a callback). Remove the columns, or keep the reference fixed."
                )
        if not self.args.precompute_ref_log_probs:  # type: ignore[attr-defined]
            return
        if self._moved_reference is not None:
            raise ValueError(
                "precompute_ref_log_probs=True scores with the reference once, before training, and a callback changes "
                "it while training. Set it to False, or leave the callback out."
            )
        assert self.model is not None

        def score(batch: Batch) -> dict[str, Tensor]:
            logps = self.scoring().reference(dict(self.take_batch(batch)), self.method.reference_names)
            return dict(zip(columns, logps.view(-1, len(columns)).unbind(dim=1), strict=True))

        size = getattr(self.args, "precompute_ref_batch_size", None) or self.args.per_device_train_batch_size
        known = partial(
            precompute_ref_log_probs,
            scoring=ReferencePass(columns, self.data_collator, score, size, settings, self.processes.copies),
            accelerator=self.accelerator, reference_fingerprint=self.reference.fingerprint(self.model),
        )  # fmt: skip
        if self.train_dataset is not None:
            self.train_dataset = known(self.train_dataset, dataset_name="train")
        if self.eval_dataset is not None:
            made = {name: known(part, dataset_name=name) for name, part in evaluation.items()}
            self.eval_dataset = made if isinstance(self.eval_dataset, dict) else made["eval"]
        self.reference = AskedInAdvance(columns)


class AskedInAdvance:
    """What is left of a reference whose log-probs are columns of the data sets."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns

    def cast(self, dtype: torch.dtype) -> None:
        """Columns stay as they are."""

    def score(self, policy: nn.Module, batch: Batch, forward: object) -> NoReturn:
        """Raises ValueError: the reference is gone."""
        raise ValueError(
            f"rows without {' and '.join(self.columns)}: the reference was asked before the first step "
            "(precompute_ref_log_probs=True) and is gone. Pass the data set to the constructor, or add these columns."
        )
