"""Rollouts as training data: prompts, completions, and columns per token and per row."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trl.collators.preference import completion_batch
from trl.data.rendering import Fields, Json
from trl.models.packed.layout import TEACHER_BATCH
from trl.tensors.ragged import Ragged

# Names of the columns of an `Experience`, which are absent where nothing fills them. Per completion token:
SAMPLING_LOGPS = "sampling_logps"  # under the distribution that was sampled from
SAMPLING_KEPT = "sampling_kept"  # log of the probability mass that truncated sampling kept
TOOL_OUTPUT = "tool_output"  # bool: written by a tool
TRAINED = "trained"  # bool
OLD = "old_logps"  # of the policy at the start of the rollout batch
FIRST_OLD = "first_old_logps"  # what ratios are to in the first optimiser step on it; absent: the policy that is scored
REF = "ref_logps"  # of the reference
TEACHER = "teacher_logps"  # of the teacher, at its own temperature
STUDENT = "student_logps"  # of the policy at the teacher's temperature, where that is not the sampling's
VALUES = "values"  # of the value model
RETURNS = "returns"  # what the value model learns
CORRECTION = "correction"  # importance weight of the sampler's mismatch
CHOSEN = "chosen"  # bool: has a weight in this optimiser step

# Per completion:
STOPPED = "stopped"  # bool: ended by a stop token or string
SCORES = "scores"  # weighted sum of the rewards, NaN where no source scored it
REWARD = "reward"  # what the method makes of it
ADVANTAGE = "advantage"  # of a completion, or of each token where it is a column per token
LENGTH = "length"  # completion tokens that the policy sampled
MEAN_LENGTH = "mean_length"  # mean length of the rollout batch
FILTERED = "filtered"  # bool: not among those that are learned from
REPLAYED = "replayed"  # bool: sampled for an earlier rollout batch
PLACE = "place"  # among the rows of those that score the same batches
RESULT_OF = "agent_result_"  # and a name: what agents returned beside rewards, NaN for none; may be absent

# Further rows of token ids:
TEACHER_PROMPTS = "teacher_prompts"
BRANCHES = "branches"


@dataclass(frozen=True, slots=True)
class Experience:
    """B completions of prompts. Immutable: `dataclasses.replace` makes the next one.

    `per_token` are tensors `(K,)` over the completions' tokens (log-probs, advantages, ...), `per_row` tensors `(B,)`
    (rewards, ...). `more` are further rows of token ids: the `TEACHER_PROMPTS` that a teacher is shown in place of the
    prompts, and `BRANCHES` of completions of several parts, each after its own prompt. For every part but the first
    a row of them has its first token's place in the completion, the number of tokens of its prompt, and these.
    """

    prompts: Ragged
    completions: Ragged
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    per_row: Mapping[str, Tensor] = field(default_factory=dict)
    more: Mapping[str, Ragged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens, rows = (len(self.completions.values), "completion tokens"), (len(self), "rows")
        for columns, (length, unit) in ((self.per_token, tokens), (self.per_row, rows)):
            for name, value in columns.items():
                if value.ndim != 1 or len(value) != length:
                    shape = tuple(value.shape)
                    raise ValueError(f"column {name!r} must have {length} numbers ({unit}), got {shape}.")

    def __len__(self) -> int:
        return len(self.completions)

    def with_tokens(self, **columns: Tensor) -> "Experience":
        """With more columns per token."""
        return replace(self, per_token={**self.per_token, **columns})

    def with_rows(self, **columns: Tensor) -> "Experience":
        """With more columns per row."""
        return replace(self, per_row={**self.per_row, **columns})

    def with_more(self, **rows: Ragged) -> "Experience":
        """With further rows of token ids."""
        return replace(self, more={**self.more, **rows})

    def take(self, indices: Tensor) -> "Experience":
        """Some rows, in the order of `indices`."""
        positions = self.completions.positions(indices)
        return Experience(
            self.prompts.take(indices),
            Ragged(self.completions.values[positions], self.completions.lengths[indices]),
            {name: value[positions] for name, value in self.per_token.items()},
            {name: value[indices] for name, value in self.per_row.items()},
            {name: rows.take(indices) for name, rows in self.more.items()},
        )

    def ragged(self, name: str) -> Ragged:
        """A column per token as rows."""
        return Ragged(self.per_token[name], self.completions.lengths)

    def parts(self, prompts: Ragged | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Prompt and completion of each row, or of each of its parts."""
        several = zip((prompts or self.prompts).split(), self.completions.split(), strict=True)
        if BRANCHES not in self.more:
            yield from several
            return
        for (prompt, completion), branches in zip(several, self.more[BRANCHES].split(), strict=True):
            begin, place = 0, 0
            while place < len(branches):
                end, length = branches[place : place + 2].tolist()
                yield prompt, completion[begin:end]
                prompt = branches[place + 2 : place + 2 + length]
                begin, place = end, place + 2 + length
            yield prompt, completion[begin:]

    def as_batch(self, *, prefix_sharing: bool, prompts: Ragged | None = None) -> Json:
        """A packed batch that scores the completion tokens after their `prompts`, in the order of `per_token`.

        With `prefix_sharing` neighbouring rows of one prompt share it, and so do their further parts whose prompts
        begin with it. After the prompts of the policy (None) there is also a `teacher_batch`, with those of a teacher.
        """
        rows: list[tuple[Tensor, list[Tensor]]] = []
        unscored: list[int] = []
        for prompt, completion in self.parts(prompts):
            shared = rows[-1][0] if prefix_sharing and rows else None
            begins = shared is not None and torch.equal(prompt[: len(shared)], shared)
            if shared is not None and begins and (BRANCHES in self.more or len(prompt) == len(shared)):
                rows[-1][1].append(torch.cat([prompt[len(shared) :], completion]))
                unscored.append(len(prompt) - len(shared))
            else:
                rows.append((prompt, [completion]))
                unscored.append(0)
        batch: Json = completion_batch(rows, prefix_sharing=prefix_sharing, unscored=unscored)
        batch["rows"] = torch.arange(len(self))
        if prompts is None and TEACHER_PROMPTS in self.more:
            batch[TEACHER_BATCH] = self.as_batch(prefix_sharing=prefix_sharing, prompts=self.more[TEACHER_PROMPTS])
        return batch

    def to(self, device: torch.device | str) -> "Experience":
        """The same on another device."""
        return Experience(
            self.prompts.to(device),
            self.completions.to(device),
            {name: value.to(device) for name, value in self.per_token.items()},
            {name: value.to(device) for name, value in self.per_row.items()},
            {name: rows.to(device) for name, rows in self.more.items()},
        )

    def state(self) -> dict[str, Tensor]:
        """Everything as 1-D tensors by name, for a checkpoint."""
        return {
            **{name: rows.values for name, rows in self.more.items()},
            **{f"{name}_lengths": rows.lengths for name, rows in self.more.items()},
            "prompts": self.prompts.values,
            "prompt_lengths": self.prompts.lengths,
            "completions": self.completions.values,
            "completion_lengths": self.completions.lengths,
            **{f"token.{name}": value for name, value in self.per_token.items()},
            **{f"row.{name}": value for name, value in self.per_row.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> "Experience":
        """The inverse of `state`."""

        def columns(kind: str) -> dict[str, Tensor]:
            return {name.removeprefix(kind): value for name, value in state.items() if name.startswith(kind)}

        return cls(
            Ragged(state["prompts"], state["prompt_lengths"]),
            Ragged(state["completions"], state["completion_lengths"]),
            columns("token."),
            columns("row."),
            {
                name: Ragged(state[name], state[f"{name}_lengths"])
                for name in (TEACHER_PROMPTS, BRANCHES)
                if name in state
            },
        )


def concatenate(parts: Sequence[Experience]) -> Experience:
    """The rows of several experiences, one after another.

    Columns of agents' results may be absent. Raises: ValueError for other differences in columns.
    """
    results = sorted({name for part in parts for name in part.per_row if name.startswith(RESULT_OF)})
    nothing = [dict.fromkeys(results, torch.full([len(part)], torch.nan)) for part in parts]
    parts = [part.with_rows(**{**row, **part.per_row}) for part, row in zip(parts, nothing, strict=True)]
    first = parts[0]
    for part in parts:
        if (part.per_token.keys(), part.per_row.keys(), part.more.keys()) != (
            first.per_token.keys(),
            first.per_row.keys(),
            first.more.keys(),
        ):
            raise ValueError("rollouts must have the same columns: return logprobs always or never.")
    return Experience(
        Ragged.joined([part.prompts for part in parts]),
        Ragged.joined([part.completions for part in parts]),
        {name: torch.cat([part.per_token[name] for part in parts]) for name in first.per_token},
        {name: torch.cat([part.per_row[name] for part in parts]) for name in first.per_row},
        {name: Ragged.joined([part.more[name] for part in parts]) for name in first.more},
    )


def save_rollout_batch(folder: Path, experience: Experience, *, rank: int, facts: Fields) -> None:
    """Write a process's part of a rollout batch, with `facts` (JSON values) by which it is known again."""
    tensors = {name: value.detach().cpu().clone() for name, value in experience.state().items()}
    save_file(tensors, folder / _name(rank), metadata={"facts": json.dumps(dict(facts), sort_keys=True)})


def load_rollout_batch(folder: Path, *, rank: int, processes: int, facts: Fields) -> Experience | None:
    """A process's part of a saved rollout batch; None where there is none with these `facts`.

    Another number of `processes` than wrote it takes equal parts of the whole, in order.
    """
    files = [folder / _name(number) for number in range(len(list(folder.glob(_name("*")))))]
    known = json.loads(json.dumps(dict(facts)))
    if not files or any(not file.is_file() or _facts(file) != known for file in files):
        return None
    if len(files) == processes:
        return Experience.from_state(read_tensors(files[rank]))
    whole = concatenate([Experience.from_state(read_tensors(file)) for file in files])
    if len(whole) % processes:
        return None
    local_count = len(whole) // processes
    return whole.take(torch.arange(rank * local_count, (rank + 1) * local_count))


def _name(rank: int | str) -> str:
    return f"rollout_{rank}.safetensors"


def _facts(file: Path) -> Any:
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["facts"])


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors in a file of safetensors by name."""
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
