"""Bad input to GRPO and RLOO: one message before the first step, or the policy that is asked for."""

import functools
import logging
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from torch import Tensor

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.grpo_runs import TRAINERS, even_tokens, logs, make, run
from trl.rewards.result import RewardError

BOTH, GRPO = ("grpo", "rloo"), ("grpo",)
ASK = {"role": "user", "content": "Why?"}
TEXT = {"prompt": "Why?"}


@dataclass(frozen=True)
class Bad:
    """What `methods` must refuse with `error`, in a message that `says` all of these words in this order."""

    methods: tuple[str, ...]
    error: type[Exception]
    says: tuple[str, ...]
    data: Any = None
    settings: dict[str, Any] = field(default_factory=dict)


def rows(*found: dict[str, Any], mixed: bool = False) -> Dataset:
    return Dataset.from_list(list(found), **({"on_mixed_types": "use_json"} if mixed else {}))


def needs_a_column(completions, solution):
    return [1.0] * len(completions)


# Of a model whose window is 256 tokens, with a tokenizer of about one letter each.
OF_PROMPTS: dict[str, Bad] = {
    "too long": Bad(
        BOTH, ValueError, ("train dataset, row 1, column 'prompt': a prompt of", "tokens, expected at most 255", "Shorten or filter"),
        rows(TEXT, {"prompt": "Why? " * 100}),
    ),
    "too long in tokens": Bad(
        BOTH, ValueError, ("row 0, column 'input_ids': a prompt of 300 tokens", "at most 255"), rows({"input_ids": [5] * 300})
    ),
    "no messages": Bad(
        BOTH, ValueError, ("row 1, column 'prompt': an empty list, expected at least one message", "Filter"),
        rows({"prompt": [ASK]}, {"prompt": []}),
    ),
    "no tokens": Bad(
        BOTH, ValueError, ("row 1, column 'input_ids': a prompt without tokens", "bos token"),
        rows({"input_ids": [5]}, {"input_ids": []}),
    ),
    "not tokens of the model": Bad(
        BOTH, ValueError, ("row 0, column 'input_ids': token id 400, expected 0 to 399", "Use the model's tokenizer"), rows({"input_ids": [400]})
    ),
    "messages after text": Bad(
        BOTH, TypeError, ("row 1, column 'prompt': a list, expected a string", "Do not mix"), rows(TEXT, {"prompt": [ASK]}, mixed=True)
    ),
    "text after messages": Bad(
        BOTH, TypeError, ("row 1, column 'prompt': 'Why?' is of type str, expected a list of messages", "Write it as"),
        rows({"prompt": [ASK]}, TEXT, mixed=True),
    ),
    "mixed rows that are no data set yet": Bad(
        BOTH, TypeError, ("train dataset, row 1, column 'prompt': messages, expected text as in row 0", "Do not mix"),
        [TEXT, {"prompt": [ASK]}],
    ),
    "a role of its own": Bad(
        BOTH, ValueError, ("row 0, column 'prompt', message 0: unknown role 'robot'",), rows({"prompt": [{**ASK, "role": "robot"}]})
    ),
    "a stream without an end": Bad(
        BOTH, ValueError, ("a stream", "max_steps=-1"),
        IterableDataset.from_generator(lambda: iter([TEXT])), {"max_steps": -1},
    ),
    "a column with the name of an argument": Bad(
        BOTH, ValueError, ("columns ['completions'], arguments of every reward function", "Rename"), rows({**TEXT, "completions": "Up."})
    ),
    "a column that a reward function misses": Bad(
        BOTH, ValueError, ("needs_a_column", "solution"), rows(TEXT), {"reward_funcs": needs_a_column}
    ),
    "no reward functions": Bad(BOTH, ValueError, ("reward_funcs is []", "Pass at least one"), rows(TEXT), {"reward_funcs": []}),
    "None for a reward function": Bad(BOTH, ValueError, ("reward_funcs is None", "Pass"), rows(TEXT), {"reward_funcs": None}),
    "more weights than functions": Bad(
        BOTH, ValueError, ("reward_weights has 2 weights for 1",), rows(TEXT), {"reward_weights": [1.0, 2.0]}
    ),
    "always the likeliest token": Bad(
        BOTH, ValueError, ("temperature",), rows(TEXT), {"generation_kwargs": {"temperature": 0.0}}
    ),
}  # fmt: skip

# With eight completions in a micro-batch, unless it is said.
OF_SETTINGS: dict[str, Bad] = {
    "groups that do not divide": Bad(
        BOTH, ValueError, ("8 completions", "multiple of num_generations"),
        settings={"num_generations": 3},
    ),
    "groups larger than a batch": Bad(
        BOTH, ValueError, ("multiple of num_generations", "Set generation_batch_size to a multiple of 16"),
        settings={"num_generations": 16},
    ),
    "half a micro-batch": Bad(
        BOTH, ValueError, ("generation_batch_size=12 must be", "to a multiple of 8"), settings={"generation_batch_size": 12}
    ),
    "two sizes that disagree": Bad(
        BOTH, ValueError, ("generation_batch_size=16", "steps_per_generation"),
        settings={"generation_batch_size": 16, "steps_per_generation": 4},
    ),
    "evaluation batches": Bad(
        BOTH, ValueError, ("num_generations_eval=4", "must divide the 6 completions"),
        settings={"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6},
    ),
    "half a completion": Bad(BOTH, TypeError, ("num_generations must be a whole number >= 2, got 2.5",), settings={"num_generations": 2.5}),
}  # fmt: skip


def cases(table: dict[str, Bad]) -> list[Any]:
    return [pytest.param(method, bad, id=f"{method}: {name}") for name, bad in table.items() for method in bad.methods]


def assert_says(error: BaseException, words: tuple[str, ...]) -> None:
    assert re.search(".*".join(map(re.escape, words)), str(error), re.DOTALL), str(error)


def of_words() -> dict[str, Any]:
    return {"processing_class": tiny_tokenizer("chatml"), "model": tiny_model("llama", vocab_size=400)}


@pytest.mark.parametrize(("method", "bad"), cases(OF_PROMPTS))
def test_prompts_and_rewards_are_refused_by_the_constructor(method, bad):
    with pytest.raises(bad.error) as caught:
        make(method, data=bad.data, given=of_words(), **bad.settings)
    assert_says(caught.value, bad.says)


@pytest.mark.parametrize(("method", "bad"), cases(OF_SETTINGS))
def test_settings_are_refused_by_the_config(method, bad):
    given = {"per_device_train_batch_size": 8, "num_generations": 4, **bad.settings}
    with pytest.raises(bad.error) as caught:
        TRAINERS[method][0]("out", use_cpu=True, **given)
    assert_says(caught.value, bad.says)


@pytest.mark.parametrize("method", BOTH)
def test_a_prompt_that_leaves_little_room_is_said_and_its_completions_are_short(method, caplog):
    ids = [[5] * 252, [5] * 252]
    with caplog.at_level(logging.WARNING, logger="trl"):
        trainer, _ = run(method, data=Dataset.from_dict({"input_ids": ids}), max_completion_length=7, max_steps=1)
    said = "2 of 2 prompts leave less than max_completion_length=7 tokens"
    assert sum(said in record.getMessage() for record in caplog.records) == 1
    assert logs(trainer)[0]["completions/max_length"] <= 4


# ---- rewards that are none


@functools.cache
def lengths_of_the_first_window() -> Tensor:
    return make()[0].make_rollout_batch(0).completions.lengths


def too_few(completions, **_):
    return [1.0] * (len(completions) - 1)


def words(completions, **_):
    return ["good"] * len(completions)


def one_nan(completions, **_):
    return [float("nan"), *[1.0] * (len(completions) - 1)]


def infinite(completions, **_):
    return [float("-inf"), *[float(number) for number in range(1, len(completions))]]


def one_number(completions, **_):
    return 1.0


def raises(completions, **_):
    raise KeyError("solution")


async def raises_later(completions, **_):
    raise KeyError("solution")


UNUSABLE = {
    "wrong length": (too_few, ("Reward source 'too_few'", "7", "8"), 8),
    "strings": (words, ("Reward source 'words'", "'good'"), 8),
    "NaN": (one_nan, ("Reward source 'one_nan'", "nan"), 1),
    "infinity": (infinite, ("Reward source 'infinite'", "inf"), 1),
    "one number for all": (one_number, ("Reward source 'one_number'", "float"), 8),
    "an error": (raises, ("Reward source 'raises' raised KeyError: 'solution'",), 8),
    "an error of an async function": (raises_later, ("Reward source 'raises_later' raised KeyError: 'solution'",), 8),
}  # fmt: skip


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("case", UNUSABLE)
def test_rewards_that_are_none_end_the_run_before_a_step(method, case):
    func, says, _ = UNUSABLE[case]
    trainer, keep = make(method, reward_funcs=func)
    with pytest.raises(RewardError) as caught:
        trainer.train()
    assert_says(caught.value, (*says, "reward_failure='skip'"))
    assert trainer.state.global_step == 0 and not keep.steps


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("case", UNUSABLE)
def test_or_are_counted_and_not_learned_from(method, case, caplog):
    func, _, failed = UNUSABLE[case]
    with caplog.at_level(logging.WARNING, logger="trl"):
        trainer, _ = run(method, reward_funcs=func, reward_failure="skip", max_steps=1, beta=0.0)
    first, lengths = logs(trainer)[0], lengths_of_the_first_window()
    found = {name: n for name, n in first.items() if name.startswith("tokens/")}
    assert found["tokens/reward_failed"] == lengths[:failed].sum() and sum(found.values()) == lengths.sum()
    assert (first["grad_norm"] > 0) == (found["tokens/trained"] > 0) == (case == "infinity")
    said = [record.getMessage() for record in caplog.records if "reward_failure='skip'" in record.getMessage()]
    assert len(said) == 1


@pytest.mark.parametrize("method", BOTH)
def test_rows_on_which_nobody_has_an_opinion_are_said_once_and_not_learned_from(method, caplog):
    def of_some(completion_ids, **_):
        return [None if number % 4 == 3 else value for number, value in enumerate(even_tokens(completion_ids))]

    with caplog.at_level(logging.WARNING, logger="trl"):
        trainer, _ = run(method, reward_funcs=[of_some, of_some], max_steps=2, beta=0.0)
    said = [record.getMessage() for record in caplog.records if "got no reward" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("2 of 8 rollouts got no reward")
    entry, lengths = logs(trainer)[0], lengths_of_the_first_window().view(2, 4)
    assert entry["tokens/reward_failed"] == lengths[:, 3].sum() and entry["tokens/trained"] == lengths[:, :3].sum()
