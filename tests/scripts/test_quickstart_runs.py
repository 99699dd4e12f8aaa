"""`trl quickstart`: what a run prints and writes, what the next one in the same folder does, what it reaches."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from trl.scripts.quickstart import main, pipeline, training
from trl.scripts.quickstart.methods import METHODS
from trl.scripts.quickstart.pipeline import STAGES
from trl.scripts.quickstart.plot import Panel, draw_run
from trl.scripts.quickstart.records import begin_stage, end_stage, plan_run
from trl.scripts.quickstart.report import Report
from trl.scripts.quickstart.stages import Context, StageResult
from trl.scripts.quickstart.task import make_task

POLICIES = ("base", "sft", "dpo")


@pytest.fixture(autouse=True)
def small_task(monkeypatch):
    """Sums up to 19: 80 problems to train on and 20 held out."""
    monkeypatch.setattr(pipeline, "LARGEST_SUM", 19)
    monkeypatch.setattr(pipeline, "HELD_OUT", 20)


def options(folder: Path, *more: str) -> list[str]:
    return ["--output_dir", str(folder), "--method", "dpo", "--max_steps", "4", "--no_color", *more]


def weights(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/model.safetensors")}


def results(folder: Path) -> dict:
    """`results.json` without what depends on the clock and the folder."""
    found = json.loads((folder / "results.json").read_text())
    del found["seconds"]
    for stage in found["stages"]:
        del stage["seconds"], stage["model_dir"]
    for curves in found["curves"].values():
        for name in [name for name in curves if name in ("eps", "runtime", "step_time")]:
            del curves[name]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "LARGEST_SUM", 19)
        patch.setattr(pipeline, "HELD_OUT", 20)
        assert main(options(folder)) == 0
    return folder


def test_a_run_tells_what_it_did_and_can_be_repeated(tmp_path, capsys, whole):
    assert main(options(tmp_path)) == 0
    first = capsys.readouterr().out
    assert "Replaces" not in first
    assert "earlier run" not in first
    for expected in (
        "Exact match on held-out problems after base: 0.0% (0 of 20)",
        "Exact match on held-out problems after sft:",
        "Pair accuracy on held-out problems after reward:",
        "Exact match on held-out problems after dpo:",
        "step     4 of 4   loss",
        "Stage by stage",
        f"Model: {tmp_path / 'dpo'}",
        f"{tmp_path / 'quickstart.png'}",
        f"trl dpo --model_name_or_path {tmp_path / 'dpo'} --dataset_name {tmp_path / 'pairs.jsonl'}",
    ):
        assert expected in first
    (tmp_path / "notes.txt").write_text("mine")
    assert main(options(tmp_path)) == 0
    assert "Replaces the results of an earlier run: " in capsys.readouterr().out
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert weights(tmp_path) == weights(whole)
    assert results(tmp_path) == results(whole)


def test_what_a_run_writes(whole):
    found = json.loads((whole / "results.json").read_text())
    assert [stage["stage"] for stage in found["stages"]] == list(METHODS["dpo"])
    rows = {stage["stage"]: stage for stage in found["stages"]}
    for name in POLICIES:
        assert 0 <= rows[name]["exact_match"] <= 1
        assert isinstance(rows[name]["reward"], float)
    for name in ("reward", "dpo"):
        assert 0 <= rows[name]["pair_accuracy"] <= 1
    assert rows["reward"]["exact_match"] is None
    assert rows["sft"]["kl"] == 0.0
    assert rows["dpo"]["kl"] > 0.0
    assert [step for step, _ in found["curves"]["sft"]["loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["curves"]["dpo"]["exact_match"]] == [1, 2, 3, 4]
    assert set(found["answers"][0]) == {"question", "answer", *POLICIES}
    assert (whole / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert len(lines(whole, "train")) == found["problems"]["train"]
    assert 40 <= len(lines(whole, "held_out_pairs")) <= 60
    held_out = {json.loads(line)["prompt"][0]["content"] for line in lines(whole, "held_out_pairs")}
    assert held_out == {answer["question"] for answer in found["answers"]}
    assert not held_out & {json.loads(line)["prompt"][0]["content"] for line in lines(whole, "pairs")}
    assert not list(whole.glob("*/checkpoint-*"))
    assert set(weights(whole)) == {"sft", "reward", "dpo"}


def lines(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.jsonl").read_text().splitlines()


@contextmanager
def stopping(monkeypatch, stage: str) -> Iterator[None]:
    """Stop a run at the end of the third step of a stage."""

    def stop(self, args, state, control, **kwargs):
        if self.stage == stage and state.global_step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training.TrainingProgress, "on_step_end", stop)
        yield


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path, capsys, monkeypatch, whole, stage):
    with stopping(monkeypatch, stage):
        main(options(tmp_path))
    assert capsys.readouterr().out.endswith("\nStopped. The same command goes on where it was.\n")
    assert not (tmp_path / "results.json").exists()
    capsys.readouterr()
    assert main(options(tmp_path)) == 0
    out = capsys.readouterr().out
    kept = METHODS["dpo"][: METHODS["dpo"].index(stage)]
    assert f"Goes on from an earlier run, of which these stages are kept: {', '.join(kept)}" in out
    assert f"Goes on from {tmp_path / stage}/checkpoint-2" in out
    assert "Replaces" not in out
    assert weights(tmp_path) == weights(whole)
    assert results(tmp_path) == results(whole)


def test_another_method_keeps_what_both_share(tmp_path, capsys, monkeypatch, whole):
    """PPO after DPO, undisturbed and stopped on the way."""
    for name in ("undisturbed", "stopped"):
        shutil.copytree(whole, tmp_path / name)
    assert main(options(tmp_path / "undisturbed", "--method", "ppo")) == 0
    out = capsys.readouterr().out
    assert "these stages are kept: base, sft, reward" in out
    assert "Stage: reward" not in out
    rows = {stage["stage"]: stage for stage in results(tmp_path / "undisturbed")["stages"]}
    assert list(rows) == list(METHODS["ppo"])
    assert rows["ppo"]["kl"] > 0.0
    assert [step for step, _ in results(tmp_path / "undisturbed")["curves"]["ppo"]["objective/kl"]] == [
        1,
        2,
        3,
        4,
    ]
    assert {name: weights(tmp_path / "undisturbed")[name] for name in weights(whole)} == weights(whole)

    with stopping(monkeypatch, "ppo"):
        main(options(tmp_path / "stopped", "--method", "ppo"))
    capsys.readouterr()
    assert main(options(tmp_path / "stopped", "--method", "ppo")) == 0
    assert f"Goes on from {tmp_path / 'stopped' / 'ppo'}/checkpoint-2" in capsys.readouterr().out
    assert weights(tmp_path / "stopped") == weights(tmp_path / "undisturbed")
    assert results(tmp_path / "stopped") == results(tmp_path / "undisturbed")


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_learning_from_right_answers_needs_no_reward_model(tmp_path, capsys, monkeypatch, whole, method):
    """From the fine-tuned model of another method's run; stopped inside a batch of completions, to the same bits."""
    for name in ("undisturbed", "stopped"):
        shutil.copytree(whole, tmp_path / name)
    assert main(options(tmp_path / "undisturbed", "--method", method)) == 0
    out = capsys.readouterr().out
    assert "these stages are kept: base, sft\n" in out
    assert "pair accuracy" not in out and "reward model" not in out
    assert f"trl grpo --model_name_or_path {tmp_path / 'undisturbed' / method} --dataset_name" in out
    found = results(tmp_path / "undisturbed")
    rows = {stage["stage"]: stage for stage in found["stages"]}
    assert list(rows) == ["base", "sft", method]
    assert rows[method]["kl"] > 0.0
    assert rows[method]["reward"] is None
    logged = found["curves"][method]
    assert all(0 <= share <= 1 for _, share in logged["rewards/is_right/mean"])
    assert set(logged) >= {"entropy", "exact_match"}
    first = json.loads(lines(tmp_path / "undisturbed", "prompts")[0])
    left, right = [word for word in first["prompt"][0]["content"].strip("?.").split() if word.isdigit()]
    assert first["answer"] == str(int(left) + int(right))

    with stopping(monkeypatch, method):
        main(options(tmp_path / "stopped", "--method", method))
    capsys.readouterr()
    assert main(options(tmp_path / "stopped", "--method", method)) == 0
    assert f"Goes on from {tmp_path / 'stopped' / method}/checkpoint-2" in capsys.readouterr().out
    assert weights(tmp_path / "stopped") == weights(tmp_path / "undisturbed")
    assert results(tmp_path / "stopped") == results(tmp_path / "undisturbed")


@dataclass(frozen=True)
class Fake:
    """A stage that does nothing."""

    name: str
    setting: int = 0
    panel: Panel | None = None


def planned(folder: Path, *, method: str, stages: list[Fake], seed: int = 0):
    context = Context(
        folder, seed, None, make_task(largest_sum=9, held_out=5, seed=seed), Report.__new__(Report)
    )
    plan = plan_run(context, method, stages)
    return [stage.name for stage in plan.kept], plan.interrupted, [path.name for path in plan.replaced]


def test_which_stages_of_an_earlier_run_are_kept(tmp_path):
    stages = [Fake("base"), Fake("sft"), Fake("dpo")]
    assert planned(tmp_path, method="dpo", stages=stages) == ([], None, [])
    context = Context(tmp_path, 0, None, make_task(largest_sum=9, held_out=5, seed=0), Report.__new__(Report))
    for number in (1, 2):
        end_stage(context, stages[:number], StageResult(stages[number - 1].name))
    begin_stage(context, stages)
    # stopped in the third stage
    assert planned(tmp_path, method="dpo", stages=stages) == (["base", "sft"], stages[2], [])
    # other settings: from the first stage that they touch
    assert planned(tmp_path, method="dpo", stages=stages, seed=1) == ([], None, ["base", "sft", "dpo"])
    other = [stages[0], Fake("sft", setting=1), stages[2]]
    assert planned(tmp_path, method="dpo", stages=other) == (["base"], None, ["sft", "dpo"])
    # another method shares what comes before
    assert planned(tmp_path, method="ppo", stages=[*stages[:2], Fake("ppo")]) == (["base", "sft"], None, [])
    # a run that had ended is replaced by the same method, and shared with another
    end_stage(context, stages, StageResult("dpo"))
    (tmp_path / "results.json").write_text(json.dumps({"method": "dpo"}))
    everything = ["results.json", "base", "sft", "dpo"]
    assert planned(tmp_path, method="dpo", stages=stages) == ([], None, everything)
    assert planned(tmp_path, method="ppo", stages=[*stages[:2], Fake("ppo")]) == (
        ["base", "sft"],
        None,
        ["results.json"],
    )


def test_stages_are_told_apart_by_their_settings():
    assert len({repr(stage) for stage in STAGES.values()}) == len(STAGES)
    assert all("object at" not in repr(stage) for stage in STAGES.values())


def test_a_picture_needs_no_curve_to_be_there(tmp_path):
    panel = Panel(title="t", unit="u", left={"loss": "loss"}, right={"nothing": "nothing"})
    curves = {"sft": {"exact_match": [(1, 0.1), (2, 0.2)], "loss": [(1, 1.0), (2, 0.5)]}, "dpo": {}}
    for panels in ({"sft": panel}, {"sft": panel, "dpo": panel}):
        draw_run(tmp_path / "x.png", panels, curves, 10)
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_run_ends_all_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(options(tmp_path)) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert (tmp_path / "results.json").is_file()
    assert not (tmp_path / "quickstart.png").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whole_runs_rise_stage_by_stage(tmp_path):
    """The command as a user runs it; the bar of the README, under 6 minutes on two free cores, is not timed here."""
    command = [sys.executable, "-m", "trl.scripts.quickstart", "--output_dir", str(tmp_path)]
    for method in ("ppo", "dpo"):  # the second keeps the stages of the first
        subprocess.run([*command, "--method", method], check=True, capture_output=True)
        base, sft, reward, last = json.loads((tmp_path / "results.json").read_text())["stages"]
        assert base["exact_match"] <= 0.02
        assert 0.1 <= sft["exact_match"] <= 0.6
        assert reward["pair_accuracy"] >= 0.85
        assert last["exact_match"] >= sft["exact_match"] + 0.15
        assert last["reward"] > sft["reward"] > base["reward"]
    assert last["pair_accuracy"] >= 0.9


FEWER_STEPS = """
import sys
from dataclasses import replace
from trl.scripts.quickstart import main
from trl.scripts.quickstart.pipeline import STAGES
STAGES |= {name: replace(STAGES[name], steps=120) for name in ("grpo", "rloo")}
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learning_from_right_answers_rises(tmp_path):
    """The whole command, but for 120 of the 800 steps of the last stage: there the share of right answers rose by 8 to 27 points
    and exact match by 7 to 38 on three seeds each (they begin at 26 to 68 %)."""
    command = [sys.executable, "-c", FEWER_STEPS, "--output_dir", str(tmp_path)]
    for method in ("grpo", "rloo"):  # the second keeps the stages of the first
        subprocess.run([*command, "--method", method], check=True, capture_output=True)
        found = json.loads((tmp_path / "results.json").read_text())
        base, sft, last = found["stages"]
        assert base["exact_match"] <= 0.02
        assert sft["exact_match"] >= 0.1
        assert last["exact_match"] >= sft["exact_match"] + 0.02
        (_, first), *_, (_, end) = found["curves"][method]["rewards/is_right/mean"]
        assert end >= first + 0.05
        assert last["kl"] > 0.0 and last["steps"] == 120
