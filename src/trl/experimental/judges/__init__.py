"""Judges at their 0.26 import path; they live in `trl.rewards.judges`. Public names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "AllTrueJudge": "trl.rewards.judges.bases",
    "BaseBinaryJudge": "trl.rewards.judges.bases",
    "BaseJudge": "trl.rewards.judges.bases",
    "BasePairwiseJudge": "trl.rewards.judges.bases",
    "BaseRankJudge": "trl.rewards.judges.bases",
    "HfPairwiseJudge": "trl.rewards.judges.chat",
    "OpenAIPairwiseJudge": "trl.rewards.judges.chat",
    "PairRMJudge": "trl.rewards.judges.pair_rm",
}

if TYPE_CHECKING:
    from trl.rewards.judges.bases import AllTrueJudge as AllTrueJudge
    from trl.rewards.judges.bases import BaseBinaryJudge as BaseBinaryJudge
    from trl.rewards.judges.bases import BaseJudge as BaseJudge
    from trl.rewards.judges.bases import BasePairwiseJudge as BasePairwiseJudge
    from trl.rewards.judges.bases import BaseRankJudge as BaseRankJudge
    from trl.rewards.judges.chat import HfPairwiseJudge as HfPairwiseJudge
    from trl.rewards.judges.chat import OpenAIPairwiseJudge as OpenAIPairwiseJudge
    from trl.rewards.judges.pair_rm import PairRMJudge as PairRMJudge

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
