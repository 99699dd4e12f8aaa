"""Bad preference data: the error's class, and a message that names row, column and what to do, before any step."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from tests.tiny_tokenizers import tiny_tokenizer

from trl.data.preference import (
    PreferencePreparation,
    RewardPreparation,
    prepare_preference_dataset,
    prepare_reward_dataset,
)

GOOD = {"prompt": "The sky is", "chosen": " blue", "rejected": " brown"}
ASK = {"role": "user", "content": "And then?"}
UP = {"role": "assistant", "content": "Look up."}
NEXT = {"role": "assistant", "content": "Next."}
CHAT = {"prompt": [ASK], "chosen": [UP], "rejected": [NEXT]}
TOKENS = {"prompt_input_ids": [5, 6], "chosen_input_ids": [7], "rejected_input_ids": [8, 9]}


@dataclass(frozen=True)
class Bad:
    """Rows that must be refused with `error`, whose message has all of `says`."""

    rows: list[dict[str, Any]]
    error: type[Exception]
    says: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    template: str = "chatml"
    special: dict[str, Any] = field(default_factory=dict)
    stored: bool = True  # whether a stored data set can hold such rows


def after(good: dict, **changes: Any) -> list[dict]:
    return [good, {**good, **changes}]


# What both preparations refuse.
COMMON: dict[str, Bad] = {
    "no rows": Bad([], ValueError, ("train dataset", "'chosen' and 'rejected'")),
    "no rejected": Bad(
        [{"prompt": "a", "chosen": "b"}], ValueError, ("row 0", "Rename the columns, or add 'rejected'")
    ),
    "unpaired": Bad([{"prompt": "a", "completion": "b", "label": True}], ValueError, ("row 0",)),
    "completions": Bad([{"prompt": "a", "completion": "b"}], ValueError, ("row 0", "SFTTrainer")),
    "None": Bad(after(GOOD, chosen=None), ValueError, ("row 1, column 'chosen'",)),
    "number": Bad([{**GOOD, "chosen": 3}], TypeError, ("row 0, column 'chosen'",)),
    "empty completion": Bad(after(GOOD, rejected=""), ValueError, ("row 1, column 'rejected'",)),
    "empty completion of messages": Bad(after(CHAT, chosen=[]), ValueError, ("row 1, column 'chosen'",)),
    "chosen text, rejected messages": Bad(
        [{"chosen": "a", "rejected": [NEXT]}], TypeError, ("row 0, column 'rejected'",)
    ),
    "chosen messages, rejected text": Bad(
        [{"chosen": [ASK, UP], "rejected": "a"}], TypeError, ("row 0, column 'rejected'",)
    ),
    "prompt messages, answers text": Bad([{**GOOD, "prompt": [ASK]}], TypeError, ("row 0, column 'prompt'",)),
    "mixed rows": Bad([GOOD, CHAT], TypeError, ("row 1, column 'chosen'",), stored=False),
    "mixed rows, messages first": Bad([CHAT, GOOD], TypeError, ("row 1, column 'chosen'",), stored=False),
    "list of strings": Bad(
        [{**GOOD, "chosen": ["a"], "rejected": ["b"]}], TypeError, ("row 0, column 'chosen', message 0",)
    ),
    "prompt that is not of the conversation": Bad(
        [{"prompt": "How many?", "chosen": [ASK, UP], "rejected": [ASK, NEXT]}],
        ValueError,
        ("row 0, column 'prompt'",),
    ),
    "prompt messages that are no prefix": Bad(
        [{"prompt": [{**ASK, "content": "How many?"}], "chosen": [ASK, UP], "rejected": [ASK, NEXT]}],
        ValueError,
        ("row 0, column 'chosen', message 0",),
    ),
    "unknown role": Bad(
        after(CHAT, rejected=[{"role": "asistant", "content": "a"}]),
        ValueError,
        ("row 1, column 'rejected', message 0",),
    ),
    "ends with the user": Bad(after(CHAT, chosen=[UP, ASK]), ValueError, ("row 1, column 'chosen'",)),
    "tools that are no JSON": Bad([{**CHAT, "tools": "look"}], ValueError, ("row 0, column 'tools'",)),
    "no chat template": Bad([CHAT], ValueError, ("row 0, column 'chosen'",), template="none"),
    "no eos token": Bad([GOOD], ValueError, ("row 0, column 'chosen'",), special={"eos_token": None}),
    "template that refuses": Bad(
        [{"prompt": [ASK], "chosen": [UP, UP], "rejected": [NEXT]}],
        ValueError,
        ("row 0, column 'chosen'",),
        template="alternating",
    ),
    "tokens outside the tokenizer": Bad(
        after(TOKENS, chosen_input_ids=[7, 400]), ValueError, ("row 1, column 'chosen_input_ids'",)
    ),
    "tokens outside the model": Bad(
        [TOKENS], ValueError, ("row 0, column 'rejected_input_ids'",), {"vocab_size": 8}
    ),
    "tokens of floats": Bad(
        [{**TOKENS, "chosen_input_ids": [7.5]}], TypeError, ("row 0, column 'chosen_input_ids'",)
    ),
    "no tokens": Bad(
        after(TOKENS, rejected_input_ids=[]), ValueError, ("row 1, column 'rejected_input_ids'",)
    ),
}

PAIRS: dict[str, Bad] = {
    **COMMON,
    "text outside the model": Bad([GOOD], ValueError, ("row 0, column 'chosen'",), {"vocab_size": 390}),
    "tokens without a prompt": Bad(
        [{"chosen_input_ids": [7], "rejected_input_ids": [8]}],
        ValueError,
        ("row 0", "add 'prompt_input_ids'"),
    ),
    "texts that share nothing": Bad(
        [{"chosen": "Blue.", "rejected": "Brown."}, {"chosen": "Blue.", "rejected": "It is."}],
        ValueError,
        ("row 1, column 'chosen'",),
    ),
    "conversations that share nothing": Bad(
        [{"chosen": [ASK, UP], "rejected": [{**ASK, "content": "How?"}, NEXT]}],
        ValueError,
        ("row 0, column 'chosen'",),
    ),
    "conversations without a question": Bad(
        [{"chosen": [UP], "rejected": [UP]}], ValueError, ("row 0, column 'chosen'",)
    ),
    "conversations that part at the user": Bad(
        [{"chosen": [ASK, UP, ASK, UP], "rejected": [ASK, UP, {**ASK, "content": "How?"}, NEXT]}],
        ValueError,
        ("row 0, column 'chosen'",),
    ),
    "no eos token for messages": Bad(
        [CHAT], ValueError, ("row 0, column 'chosen'",), special={"eos_token": None}
    ),
    "no room for completions": Bad(
        after(TOKENS, prompt_input_ids=[5, 6, 7, 8, 9]),
        ValueError,
        ("row 1, column 'prompt_input_ids'",),
        {"max_length": 4, "max_prompt_length": 4, "truncation_mode": "keep_start"},
    ),
    "no room for completions, prompt first": Bad(
        after(TOKENS, prompt_input_ids=[5, 6, 7, 8, 9]),
        ValueError,
        ("row 1, column 'prompt_input_ids'",),
        {"max_length": 4, "max_prompt_length": 6, "truncation_order": "prompt_first"},
    ),
    "reference log-prob that is NaN": Bad(
        [{**GOOD, "ref_chosen_logps": float("nan"), "ref_rejected_logps": -1.0}],
        ValueError,
        ("row 0, column 'ref_chosen_logps'",),
    ),
    "reference log-prob that is text": Bad(
        [{**GOOD, "ref_chosen_logps": -1.0, "ref_rejected_logps": "low"}],
        TypeError,
        ("row 0, column 'ref_rejected_logps'",),
    ),
}

REWARDS: dict[str, Bad] = {
    **COMMON,
    "text outside the model": Bad([GOOD], ValueError, ("row 0, column 'chosen'",), {"vocab_size": 390}),
    "margin that is None": Bad(
        [{**GOOD, "margin": 1.0}, {**GOOD, "margin": None}], ValueError, ("row 1, column 'margin'",)
    ),
    "margin that is NaN": Bad([{**GOOD, "margin": float("nan")}], ValueError, ("row 0, column 'margin'",)),
    "margin that is text": Bad([{**GOOD, "margin": "wide"}], TypeError, ("row 0, column 'margin'",)),
    "margin that is a truth value": Bad([{**GOOD, "margin": True}], TypeError, ("row 0, column 'margin'",)),
    "mask of another length": Bad(
        [{"input_ids_chosen": [7, 6], "attention_mask_chosen": [1], "input_ids_rejected": [8]}],
        ValueError,
        ("row 0, column 'attention_mask_chosen'",),
    ),
    "mask of zeros": Bad(
        [{"input_ids_chosen": [7, 6], "attention_mask_chosen": [0, 0], "input_ids_rejected": [8]}],
        ValueError,
        ("row 0, column 'attention_mask_chosen'",),
    ),
}

CASES = {
    f"pairs: {name}": (prepare_preference_dataset, PreferencePreparation, bad) for name, bad in PAIRS.items()
}
CASES |= {
    f"reward: {name}": (prepare_reward_dataset, RewardPreparation, bad) for name, bad in REWARDS.items()
}


def refuse(prepare: Any, settings: Any, case: Bad, dataset: Any) -> None:
    tokenizer = tiny_tokenizer(case.template, **case.special)
    with pytest.raises(case.error) as caught:
        rows, _ = prepare(dataset, tokenizer, settings(**case.settings))
        list(rows)
    assert type(caught.value) is case.error
    for words in case.says:
        assert words in str(caught.value)


STORED = {name: case for name, case in CASES.items() if case[2].stored}


@pytest.mark.parametrize(("prepare", "settings", "case"), STORED.values(), ids=STORED)
def test_stored_rows_are_refused(prepare: Any, settings: Any, case: Bad) -> None:
    refuse(prepare, settings, case, Dataset.from_list(case.rows))


@pytest.mark.parametrize(("prepare", "settings", "case"), CASES.values(), ids=CASES)
def test_streamed_rows_are_refused(prepare: Any, settings: Any, case: Bad) -> None:
    refuse(prepare, settings, case, IterableDataset.from_generator(lambda: iter(case.rows)))


def test_a_bad_row_further_down_a_stream_is_named_when_it_passes() -> None:
    dataset = Dataset.from_list([GOOD] * 500 + [{**GOOD, "chosen": ""}]).to_iterable_dataset()
    stream, _ = prepare_preference_dataset(dataset, tiny_tokenizer(), PreferencePreparation(), name="eval")
    with pytest.raises(ValueError, match="eval dataset, row 500, column 'chosen': an empty string"):
        list(stream)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_length": 0}, "max_length must be .*, got 0"),
        ({"max_prompt_length": 0}, "max_prompt_length must be .*, got 0"),
        ({"max_completion_length": -1}, "max_completion_length must be .*, got -1"),
        ({"truncation_mode": "keep_middle"}, "truncation_mode must be one of .* got 'keep_m"),
        ({"truncation_order": "none"}, "truncation_order must be one of .* got 'none'"),
        ({"untrained_rows": "report"}, "untrained_rows must be one of 'drop', 'error', got 'report'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PreferencePreparation(**settings)


def test_an_eos_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eos_token '<\|nowhere\|>' is not in the tokenizer's vocabulary"):
        prepare_reward_dataset(
            Dataset.from_list([GOOD]), tiny_tokenizer(), RewardPreparation(eos_token="<|nowhere|>")
        )
