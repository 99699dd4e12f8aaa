"""Where scores come from: functions, reward models, judges, ready-made reward functions. Public names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "accuracy_reward": "trl.rewards.accuracy",
    "reasoning_accuracy_reward": "trl.rewards.accuracy",
    "think_format_reward": "trl.rewards.formats",
    "get_soft_overlong_punishment": "trl.rewards.lengths",
    "resolve_reward_funcs": "trl.rewards.resolving",
    "FunctionSource": "trl.rewards.functions",
    "ModelSource": "trl.rewards.models",
    "RewardError": "trl.rewards.answers",
    "RewardInputs": "trl.rewards.inputs",
    "RewardResult": "trl.rewards.result",
    "RewardSources": "trl.rewards.source",
    "JudgeSource": "trl.rewards.judge_source",
}

if TYPE_CHECKING:
    from trl.rewards.accuracy import accuracy_reward as accuracy_reward
    from trl.rewards.accuracy import reasoning_accuracy_reward as reasoning_accuracy_reward
    from trl.rewards.answers import RewardError as RewardError
    from trl.rewards.formats import think_format_reward as think_format_reward
    from trl.rewards.functions import FunctionSource as FunctionSource
    from trl.rewards.inputs import RewardInputs as RewardInputs
    from trl.rewards.judge_source import JudgeSource as JudgeSource
    from trl.rewards.lengths import get_soft_overlong_punishment as get_soft_overlong_punishment
    from trl.rewards.models import ModelSource as ModelSource
    from trl.rewards.resolving import resolve_reward_funcs as resolve_reward_funcs
    from trl.rewards.result import RewardResult as RewardResult
    from trl.rewards.source import RewardSources as RewardSources

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
