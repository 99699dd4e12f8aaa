"""The lengths at which prompts and completions are cut, and what is left of a pair."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from trl.options.checks import check_at_least, check_one_of

TruncationMode = Literal["keep_end", "keep_start"]
TruncationOrder = Literal["sequence", "prompt_first"]

Ids = list[int]


class Side(NamedTuple):
    """A completion and the prompt that it is scored behind."""

    prompt: Ids
    completion: Ids


@dataclass(frozen=True)
class PairLengths:
    """Limits in tokens, None for none, and the order in which they are applied.

    - "sequence" (DPO): prompts keep their last `max_prompt_length` tokens, completions their first
      `max_completion_length`; then each prompt + completion keeps its last ("keep_end") or first ("keep_start")
      `max_length`. Under "keep_end" a longer completion so leaves less of the prompt than its rival does.
    - "prompt_first" (CPO, ORPO): only where the prompt and the longest completion exceed `max_length`, the prompt
      keeps its last or first `max_prompt_length` tokens, and if that is not enough every completion its first
      `max_length - max_prompt_length`. Without `max_length` prompts are cut wherever they are too long;
      `max_completion_length` acts on encoder-decoders only.

    The two sides of an encoder-decoder do not share a sequence: there `max_length` does nothing, and a prompt keeps its eos.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: TruncationMode = "keep_end"
    truncation_order: TruncationOrder = "sequence"
    is_encoder_decoder: bool = False

    def __post_init__(self) -> None:
        for name in ("max_length", "max_prompt_length", "max_completion_length"):
            check_at_least(name, getattr(self, name), minimum=1)
        check_one_of("truncation_mode", self.truncation_mode, get_args(TruncationMode))
        check_one_of("truncation_order", self.truncation_order, get_args(TruncationOrder))

    def __str__(self) -> str:
        limits = ("max_prompt_length", "max_completion_length", "max_length")
        return ", ".join(
            f"{name} {getattr(self, name)}" for name in limits if getattr(self, name) is not None
        )

    def cut(self, prompt: Ids, completions: list[Ids]) -> list[Side]:
        """What is left of each completion and of its prompt; either may be empty.

        Raises: ValueError where `max_prompt_length` leaves nothing of `max_length` for a completion that needs it.

        >>> PairLengths(max_length=4).cut([1, 2, 3], [[4], [5, 6]])
        [Side(prompt=[1, 2, 3], completion=[4]), Side(prompt=[2, 3], completion=[5, 6])]
        """
        if self.is_encoder_decoder:
            return [Side(self._encoder_prompt(prompt), c[: self.max_completion_length]) for c in completions]
        if self.truncation_order == "prompt_first":
            return self._cut_prompt_first(prompt, completions)
        prompt = _last(prompt, self.max_prompt_length)
        return [self._cut_sequence(prompt, c[: self.max_completion_length]) for c in completions]

    def _encoder_prompt(self, prompt: Ids) -> Ids:
        limit = self.max_prompt_length
        if (
            limit is None
            or len(prompt) <= limit
            or self.truncation_mode == "keep_end"
            or self.truncation_order == "sequence"
        ):
            return _last(prompt, limit)
        return [*prompt[: limit - 1], prompt[-1]]

    def _cut_sequence(self, prompt: Ids, completion: Ids) -> Side:
        excess = 0 if self.max_length is None else len(prompt) + len(completion) - self.max_length
        if excess <= 0:
            return Side(prompt, completion)
        if self.truncation_mode == "keep_end":
            return Side(prompt[excess:], completion[max(excess - len(prompt), 0) :])
        room = self.max_length - len(prompt)  # type: ignore[operator]
        if room <= 0:
            self._check_room()
        return Side(prompt[: self.max_length], completion[: max(room, 0)])

    def _cut_prompt_first(self, prompt: Ids, completions: list[Ids]) -> list[Side]:
        longest = max(map(len, completions))
        if self.max_length is None or len(prompt) + longest > self.max_length:
            limit = self.max_prompt_length
            prompt = prompt[:limit] if self.truncation_mode == "keep_start" else _last(prompt, limit)
        if self.max_length is None or len(prompt) + longest <= self.max_length:
            return [Side(prompt, completion) for completion in completions]
        self._check_room()
        taken = len(prompt) if self.max_prompt_length is None else self.max_prompt_length
        room = max(self.max_length - taken, 0)
        return [Side(prompt[: self.max_length], completion[:room]) for completion in completions]

    def _check_room(self) -> None:
        limit, longest = self.max_prompt_length, self.max_length
        if limit is not None and longest is not None and limit >= longest:
            raise ValueError(
                f"max_prompt_length {limit} leaves no token of max_length {longest} for a completion, expected less. Lower "
                "max_prompt_length, or raise max_length."
            )


def _last(ids: Ids, limit: int | None) -> Ids:
    return ids if limit is None or len(ids) <= limit else ids[-limit:]


def with_context(side: Side) -> Side:
    """A completion of which no prompt is left, with its first token, which nothing predicts, as its prompt.

    >>> with_context(Side([], [7, 8, 9]))
    Side(prompt=[7], completion=[8, 9])
    """
    return side if side.prompt else Side(side.completion[:1], side.completion[1:])
