"""The state of a loop that counts episodes."""

from dataclasses import dataclass

from transformers import TrainerState


@dataclass
class OnlineTrainerState(TrainerState):
    """`transformers.TrainerState` with the number of episodes (responses that were learned from) so far, `episode`.

    `epoch` is None before the first one, as in 0.26.

    >>> state = OnlineTrainerState(episode=512)
    >>> state.episode, state.global_step
    (512, 0)
    """

    epoch: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    episode: int = 0
