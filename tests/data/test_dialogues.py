"""Where the prompt of a written-out dialogue ends."""

import json

import pytest

from trl.data.formats import split_dialogue

ASK = "\n\nHuman: Why?\n\nAssistant:"


def test_at_the_last_turn_that_both_share():
    row = {"chosen": ASK + " So." + ASK + " Because.", "rejected": ASK + " So." + ASK + " Go away."}
    assert split_dialogue(row) == {
        "prompt": ASK + " So." + ASK,
        "chosen": " Because.",
        "rejected": " Go away.",
    }


def test_where_dialogues_part_before_their_last_turn():
    row = {"chosen": ASK + " So." + ASK + " Because.", "rejected": ASK + " No." + ASK + " Go away."}
    assert split_dialogue(row) == {
        "prompt": ASK,
        "chosen": " So." + ASK + " Because.",
        "rejected": " No." + ASK + " Go away.",
    }


def test_a_marker_of_ones_own():
    row = {"chosen": "Q: Why?\nA: So.", "rejected": "Q: Why?\nA: No."}
    assert split_dialogue(row, "A:")["chosen"] == " So."


def test_no_shared_turn():
    with pytest.raises(ValueError, match=r"share no '\\n\\nAssistant:'"):
        split_dialogue({"chosen": "Why?", "rejected": "Why not?"})


def test_every_row_of_hh_harmless(shared):
    file = shared / "data" / "hh_harmless" / "test.jsonl"
    if not file.is_file():
        pytest.skip(f"{file} is not present on this machine")
    for line in file.read_text().splitlines():
        row = json.loads(line)
        found = split_dialogue(row)
        assert found["prompt"].endswith("Assistant:")
        for side in ("chosen", "rejected"):
            assert found["prompt"] + found[side] == row[side]
