"""What a run of GRPO or RLOO hands to trackers: numbers under their documented names, and the table of completions."""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

import pytest
from datasets import Dataset

from tests.trainer.grpo_runs import prompts, run

# The usage documents' lists; RLOO's writes `reward/...` for the sources' numbers, which recorded runs log as `rewards/...`.
DOCUMENTED = {
    "num_tokens", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length",
    "completions/clipped_ratio", "rewards/even_tokens/mean", "rewards/even_tokens/std", "reward", "reward_std",
    "frac_reward_zero_std", "entropy", "kl", "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/low_min",
    "clip_ratio/high_mean", "clip_ratio/high_max", "step_time",
}  # fmt: skip
COLUMNS = ["step", "prompt", "completion", "even_tokens", "advantage"]
SETTINGS = {
    "max_steps": 2,
    "log_completions": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "max_completion_length": 16,
}


class Config(dict):
    def update(self, values, allow_val_change=False):
        super().update(values)


def stand_in(monkeypatch, name, **parts):
    """A module `name` with these parts and, where they are called, what `logged` it; an import finds it."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.logged, module.config = [], Config()
    module.Table = lambda dataframe: dataframe
    module.finish = lambda **_: None
    for part, value in parts.items():
        setattr(module, part, value)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def use_wandb(monkeypatch):
    module = stand_in(monkeypatch, "wandb", run=None)
    begun = SimpleNamespace(url="https://wandb.test/1", id="1", summary={}, _label=lambda **_: None)
    module.init = lambda **_: setattr(module, "run", begun)
    module.log = lambda values, step=None: module.logged.append(values)
    errors = stand_in(monkeypatch, "wandb.sdk.lib.config_util", ConfigError=KeyError)
    for name in ("wandb.sdk", "wandb.sdk.lib"):
        stand_in(monkeypatch, name, __path__=[], config_util=errors)
    return module


def use_trackio(monkeypatch):
    module = stand_in(monkeypatch, "trackio", __version__="0.1")
    begun, space = SimpleNamespace(value=None), SimpleNamespace(get=lambda: None)
    module.context_vars = stand_in(
        monkeypatch,
        "trackio.context_vars",
        current_run=SimpleNamespace(get=lambda: begun.value),
        current_space_id=space,
    )
    module.init = lambda **_: setattr(begun, "value", object())
    module.log = lambda values, step=None: module.logged.append(values)
    return module


@pytest.mark.parametrize(("tracker", "method"), [("wandb", "grpo"), ("wandb", "rloo"), ("trackio", "grpo")])
def test_a_run_reaches_its_tracker(tracker, method, monkeypatch, capsys):
    module = {"wandb": use_wandb, "trackio": use_trackio}[tracker](monkeypatch)
    given = {"eval_dataset": Dataset.from_dict({"input_ids": prompts(2)["input_ids"]})}
    trainer, _ = run(method, report_to=[tracker], given=given, **SETTINGS)
    numbers = [values for values in module.logged if "train/loss" in values]
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(numbers) == 2
    for values, entry in zip(numbers, history, strict=True):
        assert values.keys() >= {f"train/{name}" for name in DOCUMENTED}
        for name in DOCUMENTED:
            assert values[f"train/{name}"] == entry[name], name
        assert values["train/global_step"] == entry["step"]
    (evaluation,) = [values for values in module.logged if "eval/loss" in values]
    missing = {f"eval/{name}" for name in DOCUMENTED - {"step_time"}} - evaluation.keys()
    assert not missing
    tables = [table for values in module.logged for name, table in values.items() if name.startswith("completions")]
    assert [list(table.columns) for table in tables] == [COLUMNS] * 2
    for step, (table, values) in enumerate(zip(tables, numbers, strict=True), start=1):
        assert len(table) == 8 and set(table["step"]) == {step}
        assert table["even_tokens"].mean() == pytest.approx(values["train/rewards/even_tokens/mean"], abs=1e-12)
        assert table["advantage"].abs().max() > 0
    assert "Step 2" in capsys.readouterr().out


def test_a_run_reaches_tensorboard(tmp_path, monkeypatch, capsys):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer, _ = run("grpo", report_to=["tensorboard"], max_steps=2, log_completions=True, max_completion_length=16)
    found = reader.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert set(found.Tags()["scalars"]) >= {f"train/{name}" for name in DOCUMENTED}
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    for name in DOCUMENTED:
        assert found.Scalars(f"train/{name}")[-1].value == pytest.approx(last[name], rel=1e-6), name
    texts = [name for name in found.Tags()["tensors"] if name.startswith("completions")]
    assert len(texts) == 1 and [event.step for event in found.Tensors(texts[0])] == [1, 2]
    shown = found.Tensors(texts[0])[-1].tensor_proto.string_val[0].decode()
    assert shown.startswith("| step | prompt | completion | even_tokens | advantage |")
    assert shown.count("\n") == 9  # a head of two lines, and eight rows
    assert "Step 2" in capsys.readouterr().out
