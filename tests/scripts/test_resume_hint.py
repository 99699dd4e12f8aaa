"""What is said of how a run goes on, as words and at the end of real runs that are stopped."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoints.made import make_checkpoint as checkpoint
from tests.models.words import word_tokenizer
from tests.tiny import tiny_model
from trl.scripts import sft
from trl.scripts.messages import interruption, resume_hint
from trl.scripts.running import run_script
from trl.trainer.sft_trainer import SFTTrainer


def settings(output_dir, **given):
    defaults = {"output_dir": str(output_dir), "max_steps": -1, "save_strategy": "steps", "save_steps": 500}
    defaults |= {"save_only_model": False, "deepspeed": None}
    return SimpleNamespace(**{**defaults, **given})


@pytest.mark.parametrize(("max_steps", "longer"), [(-1, "--num_train_epochs"), (20, "--max_steps")])
def test_a_finished_run_needs_the_option_that_ended_it(tmp_path, max_steps, longer):
    newest, args = checkpoint(tmp_path, 20), settings(tmp_path, max_steps=max_steps)
    assert resume_hint(newest, args, command="dpo", finished=True) == (
        f"To resume: trl dpo with the same options, a larger {longer} and --resume_from_checkpoint true"
    )


def test_a_checkpoint_of_the_model_alone_needs_no_optimizer(tmp_path):
    newest, args = checkpoint(tmp_path, 20), settings(tmp_path, save_only_model=True)
    hint = resume_hint(newest, args, command="dpo", finished=True)
    assert hint.endswith("--resume_from_checkpoint true --resume_without optimizer random_state")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"save_strategy": "no"}, "(--save_strategy no)"),
        ({"save_steps": 40}, "(--save_strategy steps, --save_steps 40)"),
    ],
)
def test_without_a_checkpoint_nobody_is_told_to_resume(tmp_path, given, why):
    checkpoint(tmp_path, 500)  # an earlier run's
    args = settings(tmp_path, **given)
    finished = resume_hint(None, args, command="sft", finished=True)
    assert (
        finished == f"This run cannot be resumed: no checkpoint was written {why}. A new one can start from the model."
    )
    assert interruption(None, args, command="sft", step=7, steps=90) == (
        f"Stopped after step 7 of 90. It cannot be resumed: no checkpoint was written {why}. "
        "The same command starts from the beginning."
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`trl sft` on four rows for four steps; the third is met with an exception."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tiny_model("llama").save_pretrained(tmp_path / "model")
    word_tokenizer(eos_token="</s>", pad_token="<pad>", bos_token="<s>").save_pretrained(tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    data.write_text((json.dumps({"prompt": "the cat ", "completion": "sat on the mat"}) + "\n") * 4)
    step = SFTTrainer.training_step

    def run(stop, *line):
        def training_step(trainer, *args, **kwargs):
            if stop is not None and trainer.state.global_step == 3:
                raise stop
            return step(trainer, *args, **kwargs)

        monkeypatch.setattr(SFTTrainer, "training_step", training_step)
        fixed = {
            "model_name_or_path": tmp_path / "model", "dataset_name": data, "output_dir": tmp_path / "out",
            "report_to": "none", "use_cpu": "true", "max_steps": 4, "disable_tqdm": "true", "save_steps": 2,
        }  # fmt: skip
        words = [word for name, value in fixed.items() for word in (f"--{name}", str(value))]
        return run_script(sft.make_parser(), sft.main, [*words, *line])

    return run


def test_an_interruption_before_the_first_step_is_one_line(run, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("trl.scripts.loading.load_train_and_eval", interrupted)
    assert run(None) == 130
    assert capsys.readouterr().err == "trl sft: interrupted, no step was trained.\n"


def test_an_interrupted_run_says_how_far_it_came_and_how_it_goes_on(run, tmp_path, caplog, capsys):
    assert run(KeyboardInterrupt()) == 130
    said = (
        f"Stopped after step 3 of 4, newest checkpoint {tmp_path}/out/checkpoint-2. To resume: trl sft with the same "
    )
    assert f"{said}options and --resume_from_checkpoint true" in caplog.text
    assert "interrupted" not in capsys.readouterr().err
    assert run(None, "--resume_from_checkpoint", "true") == 0
    assert Path(tmp_path / "out" / "checkpoint-4").is_dir()


def test_an_interruption_while_the_model_is_saved_says_how_to_go_on(run, tmp_path, monkeypatch, caplog, capsys):
    def finish(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("trl.scripts.messages.finish", finish)
        assert run(None) == 130
    assert f"Stopped after step 4 of 4, newest checkpoint {tmp_path}/out/checkpoint-4. To resume: " in caplog.text
    assert "no step was trained" not in capsys.readouterr().err
    assert run(None, "--resume_from_checkpoint", "true") == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
