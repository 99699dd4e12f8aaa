"""`trl quickstart`: the data, and what a short run prints and writes."""

import json

import pytest
from matplotlib.figure import Figure

from trl.scripts.quickstart import METHODS, main
from trl.scripts.quickstart.task import build_model, build_tokenizer, is_right, make_pairs, make_task, replies


def test_held_out_digits_are_not_trained_on():
    task = make_task(seed=0)
    trained = {row["completion"] for row in task.train}
    assert not trained & {row["completion"] for row in task.held_out}
    for rows, count in ((task.train, 3000), (task.held_out, 300)):
        assert len({row["prompt"] for row in rows}) == count
        assert all("".join(sorted(row["prompt"][5:-1])) == row["completion"] for row in rows)


def test_pairs_hold_a_mistake_of_the_model_and_random_ones():
    tokenizer, rows = build_tokenizer(), make_task(seed=0).train[:20]
    model = build_model(tokenizer, seed=0)
    pairs = make_pairs(model, tokenizer, rows, seed=0)
    assert pairs == make_pairs(model, tokenizer, rows, seed=0)
    first = [pair for pair in pairs if pair["prompt"] == rows[0]["prompt"]]
    assert len(first) == 4
    own = replies(model, tokenizer, [rows[0]] * 4, greedy=False, seed=0)
    assert {pair["rejected"] for pair in first[:2]} <= set(own)
    other, length = (pair["rejected"] for pair in first[2:])
    assert sum(a != b for a, b in zip(first[0]["chosen"], other, strict=True)) == 1
    assert len(length) in (3, 5)
    assert is_right([pair["rejected"] for pair in first], [pair["chosen"] for pair in first]) == [0.0] * 4


@pytest.mark.parametrize("method", METHODS)
def test_a_short_run(tmp_path, capsys, method, monkeypatch):
    for rows in ("TRAIN", "HELD_OUT"):  # of which each stage makes pairs and is evaluated
        monkeypatch.setattr(f"trl.scripts.quickstart.task.{rows}", 60)
    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: (figures.append(figure), save(figure, *args, **kw))
    )
    assert main(["--output_dir", str(tmp_path), "--method", method, "--max_steps", "2", "--no_color"]) == 0
    out = capsys.readouterr().out
    stages = METHODS[method]
    for number, stage in enumerate(stages, start=1):
        assert f"Stage {number} of {len(stages)}: {stage}" in out
    lines = [line for line in out.splitlines() if line.startswith("2/2  ")]  # those of every run
    assert len(lines) == len(stages) and all(line.endswith(" left") for line in lines)
    assert [("exact" in line.split()) for line in lines] == [stage != "reward" for stage in stages]
    found = json.loads((tmp_path / "results.json").read_text())
    assert [row["stage"] for row in found["stages"]] == list(stages)
    for row in found["stages"]:
        assert row["steps"] == 2
        assert (row["exact_match"] is None) == (row["stage"] == "reward")
        assert (row["pair_accuracy"] is None) == (row["stage"] not in ("reward", "dpo"))
    assert {path.parent.name for path in tmp_path.glob("*/model.safetensors")} == set(stages)
    assert (tmp_path / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    axes = figures[0].axes
    left = [each for each in axes if each.get_title()]
    assert [each.get_title() for each in left] == list(stages)
    assert {(each.get_xlabel(), each.get_ylabel()) for each in left} == {("optimiser step", "share")}
    assert [line.get_label() for line in left[0].get_lines()] == ["exact match"]
    if method == "ppo":
        assert axes[-1].get_ylabel() == "reward, KL (nats)"
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes[-1].get_lines()}
        curves = found["curves"]["ppo"]
        assert lines == {"reward": curves["objective/scores"], "KL (nats)": curves["objective/kl"]}


@pytest.mark.parametrize("options", [["--max_steps", "0"], ["--output_dir", __file__], ["--method", "guessing"]])
def test_bad_options_end_with_status_2(options: list[str]):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2
