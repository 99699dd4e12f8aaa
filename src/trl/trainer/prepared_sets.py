"""How the data sets of a trainer are prepared: the settings of its config, and what its model can take."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

from trl.collators.preference import PairCollator
from trl.data.pipeline import Preparation
from trl.data.preference import PreferencePreparation, prepare_preference_dataset
from trl.data.prepared_sets import Prepare, PreparedSets
from trl.models.parts import embedded_tokens
from trl.models.policy import Policy
from trl.models.setup import check_positions, pad_token_id


def row_sets(
    prepare: Prepare, kind: type[Preparation], args: Any, policy: Policy, **given: Any
) -> PreparedSets:
    """The sets of a trainer with the config `args`: every setting of `kind` is its field of the same name, unless `given`."""
    settings = {item.name: getattr(args, item.name) for item in fields(kind) if hasattr(args, item.name)}
    settings |= {"num_proc": args.dataset_num_proc, "vocab_size": embedded_tokens(policy.model), **given}
    return PreparedSets(
        prepare, kind(**settings), policy.processing_class, partial(check_positions, policy.model)
    )


def pair_sets(
    args: Any,
    policy: Policy,
    prepare: Prepare = prepare_preference_dataset,
    kind: type[PreferencePreparation] = PreferencePreparation,
    **given: Any,
) -> PreparedSets:
    """The sets of a trainer of prompts and completions."""
    encodes = bool(policy.scorer.core.config.is_encoder_decoder)
    limit = args.prompt_limit(is_encoder_decoder=encodes)
    return row_sets(prepare, kind, args, policy, max_prompt_length=limit, is_encoder_decoder=encodes, **given)


def pair_collator(policy: Policy, *, shares_prefix: bool) -> Any:
    """The collator of tokenised pairs for this policy."""
    encodes = policy.scorer.core.config.is_encoder_decoder
    return PairCollator(shares_prefix, pad_token_id(policy.tokenizer) if encodes else None)
