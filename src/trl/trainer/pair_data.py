"""The data sets of the trainers of pairs: checked and tokenised before the first step."""

from __future__ import annotations

from typing import Any

from trl.collators.preference import PAIR_COLUMNS, REFERENCE_COLUMNS, PairCollator
from trl.collators.seq2seq import Seq2SeqPairCollator
from trl.data.preference import PreferencePreparation, prepare_preference_dataset
from trl.data.preference_lengths import TruncationOrder
from trl.models.parts import embedded_tokens
from trl.models.policy import Policy
from trl.models.setup import pad_token_id
from trl.trainer.prepared_sets import PreparedSets


def pair_sets(args: Any, policy: Policy, *, truncation_order: TruncationOrder = "sequence") -> PreparedSets:
    """How the sets of a trainer of pairs are prepared; `args` is its config."""
    encodes = bool(policy.scorer.core.config.is_encoder_decoder)
    settings = PreferencePreparation(
        max_length=args.max_length,
        max_prompt_length=args.prompt_limit(is_encoder_decoder=encodes),
        max_completion_length=args.max_completion_length,
        truncation_mode=args.truncation_mode,
        truncation_order=truncation_order,
        is_encoder_decoder=encodes,
        tools=getattr(args, "tools", None),
        num_proc=args.dataset_num_proc,
        vocab_size=embedded_tokens(policy.model),
        keep_columns=REFERENCE_COLUMNS,
    )
    prompt, *completions = PAIR_COLUMNS
    return PreparedSets(
        prepare=prepare_preference_dataset,
        settings=settings,
        policy=policy,
        columns=PAIR_COLUMNS,
        parts=[(prompt, completion) for completion in completions],
    )


def pair_collator(policy: Policy, *, shares_prefix: bool) -> Any:
    """What batches tokenised pairs for this policy."""
    if getattr(policy.scorer.core.config, "is_encoder_decoder", False):
        return Seq2SeqPairCollator(pad_token_id(policy.tokenizer))
    return PairCollator(prefix_sharing=shares_prefix)
