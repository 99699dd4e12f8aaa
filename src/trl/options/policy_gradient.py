"""Option groups of learning from rewards: advantages, the clipped losses, the penalty on the KL divergence, scores."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from trl.options.checks import check_one_of, warn_caller
from trl.options.groups import OptionGroup

KLPenalty = Literal["kl", "abs", "mse", "full"]


@dataclass
class AdvantageEstimation(OptionGroup):
    """How advantages follow from rewards and values (generalised advantage estimation)."""

    gamma: float = field(
        default=1.0,
        metadata={
            "help": "Discount of a reward per token that lies between it and the token it is credited to, in [0, 1]."
        },
    )
    lam: float = field(
        default=0.95,
        metadata={
            "help": "Lambda of generalised advantage estimation, in [0, 1]: 0 trusts the value head after one token, 1 the "
            "rewards alone."
        },
    )
    whiten_rewards: bool = field(
        default=False,
        metadata={"help": "Scale the tokens' rewards to unit variance before advantages are estimated."},
    )

    def check(self) -> None:
        super().check()
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} must be in [0, 1], got {getattr(self, name)}. 1.0 does not discount; the paper's lam is 0.95."
                )


@dataclass
class ClippedLosses(OptionGroup):
    """PPO's losses of policy and value function."""

    cliprange: float = field(
        default=0.2,
        metadata={
            "help": "How far the ratio of new to old probability may leave 1 before the policy loss stops rewarding it, > 0."
        },
    )
    cliprange_value: float = field(
        default=0.2,
        metadata={
            "help": "How far a value may leave the one of the rollout before the value loss is cut, in units of reward, > 0."
        },
    )
    vf_coef: float = field(
        default=0.1, metadata={"help": "Weight of the value loss beside the policy loss, >= 0."}
    )

    def check(self) -> None:
        super().check()
        for name in ("cliprange", "cliprange_value"):
            check_positive(name, getattr(self, name), "The paper uses 0.2; a large value clips nothing.")


@dataclass
class KLControl(OptionGroup):
    """The penalty that keeps a policy near its reference, and what its weight follows."""

    adap_kl_ctrl: bool = field(
        default=True,
        metadata={
            "help": "Let the penalty's weight follow the divergence to where that is target. Otherwise the weight is fixed."
        },
    )
    init_kl_coef: float = field(
        default=0.2,
        metadata={"help": "Weight of the penalty at the start, in reward per nat, >= 0."},
    )
    kl_penalty: KLPenalty = field(
        default="kl",
        metadata={
            "help": "What is penalised at each token: 'kl' the log-ratio of policy to reference, 'abs' its size, 'mse' half "
            "its square, 'full' the divergence of the whole distributions (needs memory for them)."
        },
    )
    target: float = field(
        default=6.0,
        metadata={"help": "Divergence per response that adap_kl_ctrl aims at, in nats, > 0."},
    )
    horizon: float = field(
        default=10000.0,
        metadata={"help": "Number of responses over which adap_kl_ctrl changes the weight, > 0."},
    )

    def check(self) -> None:
        super().check()
        check_one_of("kl_penalty", self.kl_penalty, get_args(KLPenalty))
        for name in ("target", "horizon"):
            check_positive(name, getattr(self, name), "Use adap_kl_ctrl=False for a fixed coefficient.")


@dataclass
class ScoreScaling(OptionGroup):
    """What is done to scores before they become rewards."""

    use_score_scaling: bool = field(
        default=False,
        metadata={
            "help": "Divide scores by the running standard deviation of all scores so far (Secrets of RLHF I, "
            "arXiv:2307.04964)."
        },
    )
    use_score_norm: bool = field(
        default=False,
        metadata={"help": "With use_score_scaling, also subtract their running mean."},
    )
    score_clip: float | None = field(
        default=None,
        metadata={"help": "Cut scores to [-score_clip, score_clip], after scaling. None: they are not cut."},
    )

    def check(self) -> None:
        super().check()
        if self.use_score_norm and not self.use_score_scaling:
            warn_caller("use_score_norm=True has no effect without use_score_scaling=True. Set both.")
        if self.score_clip is not None:
            check_positive("score_clip", self.score_clip, "Use None to leave scores uncut.")


def check_positive(name: str, value: float, hint: str) -> None:
    """Raise ValueError unless a number is greater than 0."""
    if not value > 0:
        raise ValueError(f"{name} must be > 0, got {value}. {hint}")
