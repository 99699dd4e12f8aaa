"""Preference data sets prepared for the pair losses and for reward models: token ids, truncation, counts, caching."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tests.tiny_tokenizers import tiny_tokenizer

from trl.data.pipeline import prepare_dataset
from trl.data.preference import PreferencePreparation, RewardPreparation, tokenize_preference_row
from trl.data.preference_rows import PairLengths, Side
from trl.data.prepared_sets import sequence_lengths
from trl.data.unpaired import UnpairedPreparation

BEGIN, EOS = 1, 2
SKY = {"prompt": "The sky is", "chosen": " blue", "rejected": " brown"}
THE_SKY_IS, BLUE, BROWN = [274, 376, 272], [396, EOS], [289, 86, 83, 91, 82, EOS]

ASK = {"role": "user", "content": "And then?"}
UP = {"role": "assistant", "content": "Look up."}
NEXT = {"role": "assistant", "content": "Next."}
CHAT = {"prompt": [ASK], "chosen": [UP], "rejected": [NEXT]}
WHOLE_CHAT = {"chosen": [ASK, UP], "rejected": [ASK, NEXT]}
# <|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n
OPENED = [3, 89, 336, 203, 37, 281, 382, 35, 2, 203, 3, 69, 335, 369, 88, 203]
LOOK_UP, SAY_NEXT = [309, 299, 18, 2, 203], [310, 345, 18, 2, 203]  # ...<|im_end|>\n

NUMBERS = [[*range(10, 16)], [*range(20, 23)], [*range(30, 38)]]  # a prompt of 6, completions of 3 and 8


def prepare(rows: list[dict], tokenizer: Any = None, *, streaming: bool = False, **settings: Any) -> Any:
    dataset: Any = Dataset.from_list(rows)
    if streaming:
        dataset = dataset.to_iterable_dataset()
    return prepare_dataset(dataset, tokenizer or tiny_tokenizer(), PreferencePreparation(**settings))


def prepare_reward(rows: list[dict], tokenizer: Any = None, *, streaming: bool = False, **settings: Any) -> Any:
    dataset: Any = Dataset.from_list(rows)
    if streaming:
        dataset = dataset.to_iterable_dataset()
    return prepare_dataset(dataset, tokenizer or tiny_tokenizer(), RewardPreparation(**settings))


def ids_of(row: dict, tokenizer: Any = None, **settings: Any) -> tuple[list[int], ...]:
    """The prompt's, the chosen and the rejected ids of one row whose completions share the prompt."""
    prepared, _ = prepare([row], tokenizer, **settings)
    assert prepared.column_names == ["prompt_input_ids", "chosen_input_ids", "rejected_input_ids"]
    return tuple(prepared[0].values())


# The same pair in every form -> prompt, chosen, rejected ids.
FORMS: dict[str, tuple[dict, tuple]] = {
    "text": (SKY, (THE_SKY_IS, BLUE, BROWN)),
    "text, implicit prompt": (
        {"chosen": "The sky is blue", "rejected": "The sky is brown"},
        (THE_SKY_IS, BLUE, BROWN),
    ),
    "text with its eos": ({**SKY, "chosen": " blue<|im_end|>"}, (THE_SKY_IS, BLUE, BROWN)),
    "messages": (CHAT, (OPENED, LOOK_UP, SAY_NEXT)),
    "messages, implicit prompt": (WHOLE_CHAT, (OPENED, LOOK_UP, SAY_NEXT)),
    "messages after a text prompt": (
        {"prompt": "And then?", **WHOLE_CHAT},
        (OPENED, LOOK_UP, SAY_NEXT),
    ),
    "messages that repeat the prompt": (
        {"prompt": [ASK], **WHOLE_CHAT},
        (OPENED, LOOK_UP, SAY_NEXT),
    ),
    "from and value": (
        {
            "prompt": [{"from": "human", "value": "And then?"}],
            "chosen": [{"from": "gpt", "value": "Look up."}],
            "rejected": [{"from": "gpt", "value": "Next."}],
        },
        (OPENED, LOOK_UP, SAY_NEXT),
    ),
    "tokens": (
        {"prompt_input_ids": [5, 6], "chosen_input_ids": [7], "rejected_input_ids": [8, 9]},
        ([5, 6], [7], [8, 9]),
    ),
}


@pytest.mark.parametrize(("row", "expected"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("streaming", [False, True])
def test_ids_of_every_form(row: dict, expected: tuple, streaming: bool) -> None:
    prepared, report = prepare([row, row], streaming=streaming)
    found = [dict(item) for item in prepared]
    for item in found:
        assert item.pop("rejected_prompt_input_ids", None) is None
        assert tuple(item.values()) == expected
    assert len(found) == report.rows == 2
    assert report.tokens == 2 * sum(map(len, expected))


@pytest.mark.parametrize("prompt", ["The sky is", "<s>The sky is"])
def test_one_begin_token_stands_before_the_prompt(prompt: str) -> None:
    prepared, report = prepare([{**SKY, "prompt": prompt}], tiny_tokenizer(adds_begin=True))
    assert list(prepared[0].values()) == [[BEGIN, *THE_SKY_IS], BLUE, BROWN]
    assert report.removed_begin_tokens == int(prompt.startswith("<s>"))
    bare, _ = prepare([SKY], tiny_tokenizer(adds_begin=True), add_special_tokens=False)
    assert list(bare[0].values()) == [THE_SKY_IS, BLUE, BROWN]


def test_a_template_that_writes_the_begin_token_gets_no_second_one() -> None:
    prompt, chosen, _ = ids_of(CHAT, tiny_tokenizer("begin", adds_begin=True))
    assert (prompt, chosen) == ([BEGIN, *OPENED], LOOK_UP)


def test_a_boundary_inside_a_token_goes_to_the_completions(caplog: pytest.LogCaptureFixture) -> None:
    """`app` + `les?` is ` apples` `?` together: the completions keep all of their text, in the tokens of the whole."""
    row = {"prompt": "How many app", "chosen": "les?", "rejected": "ricots"}
    tokenizer = tiny_tokenizer()
    assert tokenizer("How many app")["input_ids"] == [307, 91, 387, 294]
    assert tokenizer("How many apples?")["input_ids"] == [307, 91, 387, 303, 35]
    prepared, report = prepare([row])
    assert list(prepared[0].values()) == [[307, 91, 387], [303, 35, EOS], [294, 86, 77, 277, 338, EOS]]
    assert report.shifted_rows == 1
    assert "a token reaches over the end of the prompt" in caplog.text
    whole = prepared[0]["prompt_input_ids"] + prepared[0]["chosen_input_ids"]
    assert tokenizer.decode(whole) == "How many apples?<|im_end|>"


def test_implicit_prompts_part_between_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """The texts part within a word (` bl`): both completions begin with the whole word's own tokens."""
    prepared, report = prepare([{"chosen": "The sky is blue", "rejected": "The sky is blurred"}])
    assert list(prepared[0].values()) == [THE_SKY_IS, BLUE, [374, 86, 284, 72, EOS]]
    assert (report.shifted_rows, caplog.text) == (0, "")


def test_an_answer_that_the_other_continues_is_its_eos(caplog: pytest.LogCaptureFixture) -> None:
    prepared, report = prepare([{"chosen": "The sky is blue", "rejected": "The sky is"}])
    assert list(prepared[0].values()) == [THE_SKY_IS, BLUE, [EOS]]
    assert report.empty_completions == 1
    assert "in 1 of 1 rows (first: [0]) one answer is a beginning of the other" in caplog.text


def test_of_conversations_that_continue_each_other_the_last_answer_is_compared() -> None:
    prompt, chosen, rejected = ids_of({"chosen": [ASK, UP], "rejected": [ASK, UP, ASK, NEXT]})
    assert (prompt, chosen) == (OPENED, LOOK_UP)
    assert rejected == [*LOOK_UP, *OPENED, *SAY_NEXT]


def test_the_stop_token_is_added_where_the_template_has_none() -> None:
    _, chosen, rejected = ids_of(CHAT, tiny_tokenizer("no_stop"))
    assert chosen[-1] == rejected[-1] == EOS
    assert chosen.count(EOS) == 1


def test_tools_come_from_the_rows_or_the_settings() -> None:
    look = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
    tokenizer = tiny_tokenizer("qwen3_like")
    for rows, settings in (([{**CHAT, "tools": json.dumps([look])}], {}), ([CHAT], {"tools": [look]})):
        prompts = [
            prepare(rows, tokenizer, **settings)[0][0]["prompt_input_ids"],
            prepare_reward(rows, tokenizer, **settings)[0][0]["chosen_input_ids"],
        ]
        assert all('"name": "look"' in tokenizer.decode(prompt) for prompt in prompts)
    assert "# Tools" not in tokenizer.decode(prepare([CHAT], tokenizer)[0][0]["prompt_input_ids"])


def test_template_kwargs_of_a_row_reach_the_template() -> None:
    tokenizer = tiny_tokenizer("qwen3_like")
    thoughtless = {
        **CHAT,
        "chosen": [{**UP, "content": "<think>\n\n</think>\n\nLook up."}],
        "rejected": [{**NEXT, "content": "<think>\n\n</think>\n\nNext."}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    prepared, _ = prepare([thoughtless], tokenizer)
    assert tokenizer.decode(prepared[0]["prompt_input_ids"]).endswith("<think>\n\n</think>\n\n")
    assert tokenizer.decode(prepared[0]["chosen_input_ids"]).startswith("Look up.")


def test_encoder_decoders_have_an_eos_behind_the_prompt_and_no_begin_token_before_completions() -> None:
    tokenizer = tiny_tokenizer(adds_begin=True)
    assert ids_of(SKY, tokenizer, is_encoder_decoder=True) == ([BEGIN, *THE_SKY_IS, EOS], BLUE, BROWN)
    assert ids_of(SKY, is_encoder_decoder=True, max_prompt_length=2, max_completion_length=3) == (
        [272, EOS],
        BLUE,
        BROWN[:3],
    )
    assert ids_of(SKY, is_encoder_decoder=True, max_length=1) == ([*THE_SKY_IS, EOS], BLUE, BROWN)
    start = {"truncation_mode": "keep_start", "truncation_order": "prompt_first", "max_prompt_length": 2}
    assert ids_of(SKY, is_encoder_decoder=True, **start) == ([274, EOS], BLUE, BROWN)


# Limits -> for the prompt 10..15 and completions 20..22, 30..37: (prompt, completion) of each.
P, C, R = NUMBERS
CUTS: dict[str, tuple[PairLengths, list[tuple[list[int], list[int]]]]] = {
    "none": (PairLengths(), [(P, C), (P, R)]),
    "prompt": (PairLengths(max_prompt_length=2), [([14, 15], C), ([14, 15], R)]),
    "prompt, keep_start": (
        PairLengths(max_prompt_length=2, truncation_mode="keep_start"),
        [([14, 15], C), ([14, 15], R)],
    ),
    "completion": (PairLengths(max_completion_length=4), [(P, C), (P, R[:4])]),
    "sequence": (PairLengths(max_length=10), [(P, C), (P[4:], R)]),
    "sequence, keep_start": (PairLengths(max_length=10, truncation_mode="keep_start"), [(P, C), (P, R[:4])]),
    "sequence shorter than a completion": (PairLengths(max_length=5), [(P[4:], C), ([], R[3:])]),
    "sequence shorter than the prompt": (
        PairLengths(max_length=5, truncation_mode="keep_start"),
        [(P[:5], []), (P[:5], [])],
    ),
    "all three": (PairLengths(6, 4, 5), [(P[3:], C), ([15], R[:5])]),
    "prompt first, enough": (PairLengths(12, 3, truncation_order="prompt_first"), [(P[3:], C), (P[3:], R)]),
    "prompt first, fits": (PairLengths(14, 3, truncation_order="prompt_first"), [(P, C), (P, R)]),
    "prompt first, then completions": (
        PairLengths(8, 3, truncation_order="prompt_first"),
        [(P[3:], C), (P[3:], R[:5])],
    ),
    "prompt first, keep_start": (
        PairLengths(8, 3, truncation_mode="keep_start", truncation_order="prompt_first"),
        [(P[:3], C), (P[:3], R[:5])],
    ),
    "prompt first, no prompt limit": (
        PairLengths(8, truncation_order="prompt_first"),
        [(P, C[:2]), (P, R[:2])],
    ),
    "prompt first, no sequence limit": (
        PairLengths(None, 3, truncation_order="prompt_first"),
        [(P[3:], C), (P[3:], R)],
    ),
}


@pytest.mark.parametrize(("lengths", "expected"), CUTS.values(), ids=CUTS)
def test_cuts(lengths: PairLengths, expected: list) -> None:
    assert lengths.cut(P, [C, R]) == [Side(*side) for side in expected]


TOKENS = dict(zip(("prompt_input_ids", "chosen_input_ids", "rejected_input_ids"), NUMBERS, strict=True))


def test_a_prompt_that_differs_stands_in_a_column_of_its_own() -> None:
    rows, report = prepare([TOKENS, {**TOKENS, "rejected_input_ids": [30, 31]}], max_length=10)
    assert rows[0] == {**TOKENS, "rejected_prompt_input_ids": [14, 15]}
    assert rows[1] == {**TOKENS, "rejected_input_ids": [30, 31], "rejected_prompt_input_ids": None}
    assert (report.truncated_rows, report.removed_tokens) == (1, 4)
    again, counted = prepare(rows.to_list(), max_length=10)
    assert again.to_list() == rows.to_list()
    assert counted.removed_tokens == 0


def test_without_a_prompt_the_first_token_is_the_context(caplog: pytest.LogCaptureFixture) -> None:
    rows, report = prepare([TOKENS], max_length=5)
    assert rows[0] == {
        "prompt_input_ids": [14, 15],
        "chosen_input_ids": C,
        "rejected_input_ids": [34, 35, 36, 37],
        "rejected_prompt_input_ids": [33],
    }
    assert report.promptless_rows == 1
    assert "in 1 of 1 rows (first: [0]) the prompt has no token" in caplog.text
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"row 0, column 'chosen_input_ids': truncation .* the prompt"):
            prepare([TOKENS], max_length=5, untrained_rows="error", streaming=streaming)


def test_rows_that_lose_a_completion_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    short = {"prompt_input_ids": [5], "chosen_input_ids": [6], "rejected_input_ids": [7]}
    limits = {"max_length": 5, "truncation_mode": "keep_start"}
    for streaming in (False, True):
        caplog.clear()
        rows, report = prepare([short, TOKENS], streaming=streaming, **limits)
        assert [row["prompt_input_ids"] for row in rows] == [[5]]
        assert (report.rows, report.untrained_rows, report.dropped_rows, report.tokens) == (2, 1, 1, 3)
        assert (
            caplog.text.count("in 1 of 2 rows (first: [1]) no trained token is left, so they are dropped. Raise") == 1
        )
        with pytest.raises(ValueError, match=r"row 1, column 'chosen_input_ids': truncation .* leaves no"):
            prepare([short, TOKENS], streaming=streaming, untrained_rows="error", **limits)
        with pytest.raises(ValueError, match="rows are"):
            prepare([TOKENS, TOKENS], streaming=streaming, **limits)


def test_equal_completions_are_counted_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    equal = {**SKY, "rejected": " blue"}
    for streaming in (False, True):
        caplog.clear()
        rows, report = prepare([SKY, equal, SKY, equal, equal, equal] * 30, streaming=streaming)
        assert len(list(rows)) == 180
        assert (report.equal_rows, report.dropped_rows) == (120, 0)
        assert report.first["equal_rows"] == [1, 3, 4]
        assert caplog.text.count("the chosen and the rejected completion are equal") == 1
        assert "(first: [1, 3, 4])" in caplog.text
    assert prepare([{"chosen": "Blue.", "rejected": "Blue."}])[1].equal_rows == 1
    assert prepare([{"chosen": [ASK, UP], "rejected": [ASK, UP]}])[1].equal_rows == 1
    assert prepare_reward([equal, SKY])[1].equal_rows == 1


def test_reference_log_probs_and_named_columns_are_kept() -> None:
    row = {**SKY, "ref_chosen_logps": -3.5, "ref_rejected_logps": -4, "source": "a", "other": 1}
    rows, _ = prepare([row], keep_columns=("source",))
    assert rows[0]["ref_chosen_logps"] == -3.5
    assert rows[0]["ref_rejected_logps"] == -4.0
    assert rows[0]["source"] == "a"
    assert "other" not in rows.column_names


def test_two_processes_count_and_number_rows_as_one() -> None:
    rows = [{**SKY, "chosen": f" blue {number}"} for number in range(20)] + [{**SKY, "rejected": " blue"}]
    alone, counted = prepare(rows, max_length=7)
    together, report = prepare(rows, max_length=7, num_proc=2)
    assert together.to_list() == alone.to_list()
    assert report == counted
    assert report.first["equal_rows"] == [20]
    with pytest.raises(ValueError, match="row 15, column 'chosen'"):
        prepare([*rows[:15], {**SKY, "chosen": ""}, *rows[16:]], num_proc=2)


def test_prepared_twice_is_read_from_the_cache(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(SKY))
    for _ in range(2):
        dataset: Any = Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))
        for prepare_with, settings in (
            (prepare_dataset, PreferencePreparation(max_length=9)),
            (prepare_dataset, RewardPreparation(max_length=9)),
        ):
            prepared = [prepare_with(dataset, tiny_tokenizer(), settings) for _ in range(2)]  # type: ignore[operator]
            assert len({rows._fingerprint for rows, _ in prepared}) == 1
            assert prepared[0][0].cache_files == prepared[1][0].cache_files != []
            assert prepared[0][1] == prepared[1][1]
    first, _ = prepare_dataset(dataset, tiny_tokenizer(), PreferencePreparation(max_length=9))
    other, _ = prepare_dataset(dataset, tiny_tokenizer(), PreferencePreparation(max_length=8))
    assert other._fingerprint != first._fingerprint


# Reward rows -> chosen, rejected ids.
REWARDS: dict[str, tuple[dict, tuple]] = {
    "text": (SKY, ([*THE_SKY_IS, *BLUE], [*THE_SKY_IS, *BROWN])),
    "text, implicit prompt": (
        {"chosen": "The sky is blue", "rejected": "The sky is brown"},
        ([*THE_SKY_IS, *BLUE], [*THE_SKY_IS, *BROWN]),
    ),
    "text that shares nothing": ({"chosen": " blue", "rejected": " brown"}, (BLUE, BROWN)),
    "messages": (CHAT, ([*OPENED, *LOOK_UP], [*OPENED, *SAY_NEXT])),
    "messages, implicit prompt": (WHOLE_CHAT, ([*OPENED, *LOOK_UP], [*OPENED, *SAY_NEXT])),
    "messages after a text prompt": (
        {"prompt": "And then?", **WHOLE_CHAT},
        ([*OPENED, *LOOK_UP], [*OPENED, *SAY_NEXT]),
    ),
    "tokens": ({"chosen_input_ids": [7], "rejected_input_ids": [8, 9]}, ([7], [8, 9])),
    "tokens with a prompt": (
        {"prompt_input_ids": [5], "chosen_input_ids": [7], "rejected_input_ids": [8, 9]},
        ([5, 7], [5, 8, 9]),
    ),
    "older columns": (
        {
            "input_ids_chosen": [7, 6, 0],
            "attention_mask_chosen": [1, 1, 0],
            "input_ids_rejected": [0, 8, 9],
            "attention_mask_rejected": [0, 1, 1],
        },
        ([7, 6], [8, 9]),
    ),
    "older columns with a prompt": (
        {"prompt_input_ids": [7], "input_ids_chosen": [7, 6], "input_ids_rejected": [7, 8]},
        ([7, 6], [7, 8]),
    ),
    "older columns without masks": ({"input_ids_chosen": [7, 6], "input_ids_rejected": [8]}, ([7, 6], [8])),
}


@pytest.mark.parametrize(("row", "expected"), REWARDS.values(), ids=REWARDS)
@pytest.mark.parametrize("streaming", [False, True])
def test_whole_sequences_for_reward_models(row: dict, expected: tuple, streaming: bool) -> None:
    prepared, report = prepare_reward([{**row, "margin": 2}], streaming=streaming)
    chosen, rejected = expected
    assert list(prepared) == [{"chosen_input_ids": chosen, "rejected_input_ids": rejected, "margin": 2.0}]
    assert report.tokens == len(chosen) + len(rejected)


def test_rows_longer_than_max_length_are_left_out_of_reward_data(caplog: pytest.LogCaptureFixture) -> None:
    short = {**SKY, "rejected": " grey"}
    lengths = [len(row["rejected_input_ids"]) for row in prepare_reward([SKY, short])[0]]
    for streaming in (False, True):
        caplog.clear()
        limit = min(lengths)
        rows, report = prepare_reward([SKY, short, short], max_length=limit, streaming=streaming)
        assert len(list(rows)) == 2
        assert (report.rows, report.untrained_rows, report.dropped_rows) == (3, 1, 1)
        assert "1 untrained rows, 1 dropped rows" in report.summary()
        assert (
            caplog.text.count(
                "in 1 of 3 rows (first: [0]) a sequence has more than max_length tokens, so they are dropped. Raise"
            )
            == 1
        )
        with pytest.raises(ValueError, match=r"rejected_input_ids' has more than max_length 4 tokens.*rows are"):
            prepare_reward([SKY, short], max_length=4, streaming=streaming)
        with pytest.raises(ValueError, match="row 0, column 'chosen_input_ids': this sequence or the one in"):
            prepare_reward([SKY, short], max_length=limit, streaming=streaming, untrained_rows="error")


def test_the_published_row_function() -> None:
    plain = tokenize_preference_row(SKY, tiny_tokenizer(), add_special_tokens=False)
    assert plain == dict(zip(TOKENS, (THE_SKY_IS, BLUE, BROWN), strict=True))
    wrapped = tokenize_preference_row(SKY, tiny_tokenizer())
    assert wrapped["prompt_input_ids"] == [BEGIN, *THE_SKY_IS, EOS]
    assert tokenize_preference_row(SKY, tiny_tokenizer(bos_token=None))["prompt_input_ids"] == [
        *THE_SKY_IS,
        EOS,
    ]
    cut = tokenize_preference_row(
        SKY, tiny_tokenizer(), max_prompt_length=2, max_completion_length=2, add_special_tokens=False
    )
    assert cut == dict(zip(TOKENS, (THE_SKY_IS[1:], BLUE, BROWN[:2]), strict=True))
    with pytest.raises(ValueError, match="the tokenizer has no eos token"):
        tokenize_preference_row(SKY, tiny_tokenizer(eos_token=None))


@pytest.mark.parametrize(
    "settings",
    [
        PreferencePreparation(max_length=12),
        PreferencePreparation(),
        UnpairedPreparation(max_length=24, max_prompt_length=4, mismatch_group=2),
        UnpairedPreparation(max_length=24, max_prompt_length=4),
    ],
)
def test_the_longest_sequence_has_the_prompt_that_it_is_cut_to(settings):
    pair = {"chosen": " A: 7", "rejected": " A: Seven apples and 12 pears are left, and the sky is blue."}
    rows = [{"prompt": "Q: What colour is the sky?", **pair}, {"prompt": "Q: And then?", **pair}]
    prepared, _ = prepare_dataset(Dataset.from_list(rows), tiny_tokenizer(), settings)
    others = settings.other_prompts
    assert (others in prepared.column_names) == (settings.max_length is not None and others is not None)
    expected = []
    for row in prepared:
        prompts = [row["prompt_input_ids"]] * len(settings.sequences)
        prompts[-1] = row.get(others) or prompts[0]
        expected.append(max(len(p) + len(row[c]) for p, (_, c) in zip(prompts, settings.sequences, strict=True)))
    assert sequence_lengths(prepared, settings).tolist() == expected
    assert max(expected) <= (settings.max_length or 100)
