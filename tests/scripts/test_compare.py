"""`trl compare`: figures, answers and errors, on two tiny models."""

import json

import pytest

from tests.tiny import tiny_model
from tests.trainer.resume_worker import tokenizer
from trl.cli.main import main

PROMPTS = ["w5 w6 w7", "w8 w9", "w10", "w11 w12 w13 w14"]


@pytest.fixture
def models(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        tiny_model("llama", seed=seed).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (tmp_path / "blank.jsonl").write_text('{"prompt": "w5"}\n{"prompt": null}\n')
    (tmp_path / "words.py").write_text(
        "from trl.experimental.judges import BasePairwiseJudge\n"
        "class Longer(BasePairwiseJudge):\n"
        "    def judge(self, prompts, completions, shuffle_order=True):\n"
        "        return [int(len(b) > len(a)) for a, b in completions]\n"
    )
    return tmp_path


def test_the_second_model_wins_where_the_judge_says_so(models, monkeypatch, capsys):
    monkeypatch.chdir(models)
    given = [
        "compare",
        "a",
        "b",
        "--judge",
        "words.Longer",
        "--prompts",
        "prompts.jsonl",
        "--max_new_tokens",
        "6",
    ]
    assert main([*given, "--out", "found.json"]) == 0
    found = json.loads((models / "found.json").read_text())
    shares = [row["share_of_second"] for row in found["rows"]]
    assert shares == [
        0.5 if row["first"] == row["second"] else float(len(row["second"]) > len(row["first"])) for row in found["rows"]
    ]
    assert found["win_rate"] == sum(shares) / 4 and found["win_rate_low"] < found["win_rate"] < found["win_rate_high"]
    assert "length controlled win rate" in capsys.readouterr().out


def test_a_model_ties_with_itself(models, monkeypatch):
    monkeypatch.chdir(models)
    given = [
        "compare",
        "a",
        "a",
        "--judge",
        "words.Longer",
        "--prompts",
        "prompts.jsonl",
        "--max_new_tokens",
        "4",
    ]
    assert main([*given, "--out", "found.json"]) == 0
    found = json.loads((models / "found.json").read_text())
    assert (found["win_rate"], found["ties"]) == (0.5, 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--judge": "best"}, "pair_rm"),
        ({"--prompts": "none.jsonl"}, "none.jsonl"),
        ({"--split": "valid"}, "valid"),
        ({"--num_prompts": "0"}, "num_prompts"),
        ({"--prompts": "blank.jsonl"}, "row 1"),
        ({"--out": "nowhere/found.json"}, "nowhere"),
    ],
)
def test_wrong_options(models, monkeypatch, capsys, changed, message):
    monkeypatch.chdir(models)
    options = {"--judge": "words.Longer", "--prompts": "prompts.jsonl", **changed}
    words = [word for pair in options.items() for word in pair]
    assert main(["compare", "a", "b", *words]) != 0
    assert message in capsys.readouterr().err


def test_answers_on_disk_are_not_asked_for_again(models, monkeypatch, capsys):
    """In both orders: the judge sees each pair twice in the first call, and none in the second."""
    monkeypatch.chdir(models)
    given = [
        "compare",
        "a",
        "b",
        "--judge",
        "words.Longer",
        "--prompts",
        "prompts.jsonl",
        "--max_new_tokens",
        "6",
    ]
    given += ["--judge_cache", "answers.sqlite", "--judge_swap_positions", "--out", "found.json"]
    found = []
    for _ in range(2):
        assert main(given) == 0
        found.append(json.loads((models / "found.json").read_text()))
    costs = [[each.pop(f"judge_{name}") for name in ("calls", "cached", "seconds")] for each in found]
    assert found[0] == found[1] and 0 <= found[0]["judge_agreement"] <= 1
    assert costs[0][0] == costs[1][1] > 0 and costs[1][0] == 0
    main([*given, "--judge_max_calls", "1", "--judge_cache", "new.sqlite"])
    kept = json.loads((models / "found.json").read_text())
    assert kept["unanswered"] and [row["second"] for row in kept["rows"]] == [row["second"] for row in found[0]["rows"]]
