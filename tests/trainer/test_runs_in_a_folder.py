"""Runs that share an output folder, and checkpoints that lost a part or are of another run, with real trainers."""

import json
import logging
import shutil
from datetime import datetime
from unittest.mock import Mock

import pytest
import torch
import transformers.trainer
import transformers.utils.chat_template_utils
from datasets import Dataset
from transformers import TrainerCallback

from tests.checkpoints.made import forget_sums
from tests.checkpoints.test_ownership import holder
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer import dpo_runs
from tests.trainer.sft_runs import make, model_for
from tests.two_processes import launch
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.checkpoints import progress
from trl.checkpoints.ownership import PREFIX, run_folder_name
from trl.checkpoints.wholeness import CheckpointError

ROWS = [{"text": text} for text in ("Look up.", "Next.", "It is blue.", "The sky?")] * 2
SAVED = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of a run of two steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("first")
    make(ROWS, folder=folder, **SAVED).train()
    return folder


@pytest.fixture
def folder(first, tmp_path):
    return shutil.copytree(first, tmp_path / "run")


def resume(folder, rows=ROWS, checkpoint=True, **settings):
    trainer = make(rows, folder=folder, **{**SAVED, "max_steps": 3, **settings})
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def test_a_run_does_not_start_beside_a_live_one(folder):
    with holder(folder):
        for checkpoint in (None, True):
            with pytest.raises(CheckpointError, match="Another run is active"):
                resume(folder, checkpoint=checkpoint)
    assert resume(folder).state.global_step == 3
    assert not list(folder.glob(f"{PREFIX}*"))


def test_a_callback_saves_in_a_run_that_was_not_to_save(tmp_path, caplog):
    class Saves(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_save = True

    make(ROWS, folder=tmp_path, max_steps=2, save_strategy="no", trainer={"callbacks": [Saves()]}).train()
    assert sorted(path.name for path in tmp_path.glob("*-*")) == [
        "checkpoint-1",
        "checkpoint-2",
    ]  # no run folder
    with caplog.at_level(logging.WARNING):
        assert resume(tmp_path).state.global_step == 3
    assert "another run" not in caplog.text


def test_a_checkpoint_without_weights_is_not_published(folder):
    trainer = make(ROWS, folder=folder, **{**SAVED, "max_steps": 3})
    inner = trainer.save_progress

    def save(written):
        inner(written)
        for file in trainer.runs.current.folder.glob("*/model.safetensors"):
            file.unlink()  # as another program would that takes the folder for an abandoned one

    trainer.save_progress = save
    with pytest.raises(CheckpointError, match=r"has no weights, expected those of step 3"):
        trainer.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in folder.glob("*-*")) == ["checkpoint-1", "checkpoint-2"]


def test_a_run_among_another_runs_checkpoints_says_so_once(folder, caplog):
    with caplog.at_level(logging.WARNING):
        assert resume(folder).state.global_step == 3
        assert "another run" not in caplog.text
        resume(folder, checkpoint=None)
    assert caplog.text.count("holds checkpoints of another run (checkpoint-3, checkpoint-2, checkpoint-1)") == 1
    caplog.clear()
    resume(folder, max_steps=4)
    assert "another run" not in caplog.text


def test_another_method_runs_in_the_same_folder_but_does_not_resume(folder):
    trainer = dpo_runs.make(str(folder), **SAVED)
    with pytest.raises(CheckpointError, match="is of a run of SFT, and this is DPO"):
        trainer.train(resume_from_checkpoint=True)
    dpo_runs.make(str(folder), **SAVED).train()
    assert not list(folder.glob(f"{PREFIX}*"))


def test_another_model_is_refused(folder):
    with pytest.raises(CheckpointError, match=r"of another model \(.*hidden_size: 32, now 16"):
        make(ROWS, model=model_for(hidden_size=16), folder=folder, **SAVED).train(resume_from_checkpoint=True)


def test_other_rows_are_refused_unless_none_are_skipped(folder):
    for rows in (ROWS[:-1], ROWS[::-1]):
        with pytest.raises(CheckpointError, match=r"was trained on other rows \(8, now [78]\)"):
            resume(folder, rows)
    assert resume(folder, ROWS[:-1], ignore_data_skip=True).state.global_step == 3


def test_other_settings_are_a_line_each(folder, caplog):
    with caplog.at_level(logging.WARNING):
        resume(folder, learning_rate=0.5, weight_decay=0.1)
    lines = [
        each.message.rpartition(": ")[0].rpartition(": ")[2]
        for each in caplog.records
        if "another setting" in each.message
    ]
    assert lines == ["max_steps", "learning_rate", "weight_decay"]


@pytest.mark.parametrize(
    ("file", "part"),
    [("optimizer.pt", "optimizer"), ("scheduler.pt", "optimizer"), ("rng_state.pth", "random_state"), ("progress_0.json", "progress")],
)  # fmt: skip
def test_a_lost_part_starts_anew_only_where_the_user_says_so(file, part, folder, caplog):
    lost = folder / "checkpoint-2"
    (lost / file).write_bytes((lost / file).read_bytes()[:50])
    with pytest.raises(CheckpointError, match=rf"{file} cannot be read.*{folder}/checkpoint-1, which is whole"):
        resume(folder, checkpoint=str(lost))
    trainer = resume(folder, checkpoint=str(lost), resume_without=[part])
    assert f"{part} of {lost} start anew" in caplog.text
    assert trainer.state.global_step == 3
    steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert steps == {1 if part == "optimizer" else 3}


@pytest.mark.parametrize("damage", ["other sizes", "fewer layers"])
def test_weights_of_another_model_are_named(damage, folder):
    lost = folder / "checkpoint-2"
    other = model_for(**{"hidden_size": 16} if damage == "other sizes" else {"num_hidden_layers": 1})
    other.save_pretrained(folder / "other")
    shutil.copy(folder / "other" / "model.safetensors", lost)
    forget_sums(lost)
    with pytest.raises(CheckpointError, match=r"model.safetensors in .*checkpoint-2 cannot be loaded") as raised:
        resume(folder, checkpoint=str(lost))
    assert f"Resume from {folder}/checkpoint-1, which is whole" in str(raised.value)


def test_a_dead_runs_folder_is_removed_and_one_of_another_program_is_not(folder):
    left = folder / run_folder_name()
    (left / "checkpoint-9").mkdir(parents=True)
    resume(folder)
    assert (left / "checkpoint-9").is_dir()  # nobody knows whose it is


def test_two_processes_are_one_owner(tmp_path):
    launch("tests.trainer.run_worker", str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("*-*")) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]


SECRETS = ("s3cret", "hf_" + "aB3" * 12)


def files_with(folder, secrets):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)]


@pytest.mark.parametrize("trainer", ["sft", "dpo", "grpo"])
def test_no_file_of_a_run_holds_a_secret(trainer, tmp_path, caplog):
    model_for().save_pretrained(tmp_path / "model")
    inner = {"token": SECRETS[0], "dtype": "float32"}
    secrets = {"model_init_kwargs": inner, "hub_token": SECRETS[1], "report_to": "tensorboard"}
    run = tmp_path / "run"

    def resumed(inner, steps, **more):
        settings = {**SAVED, **secrets, "model_init_kwargs": inner, "max_steps": steps, **more}
        if trainer == "sft":
            return make(ROWS, model=str(tmp_path / "model"), folder=run, **settings)
        rows = Dataset.from_list([{"prompt": "The sky?", "chosen": " It is blue.", "rejected": " Next."}] * 4)
        kinds = {"dpo": (DPOConfig, DPOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}
        config, kind = kinds[trainer]
        if trainer == "grpo":
            settings |= {"num_generations": 2, "max_completion_length": 2, "per_device_train_batch_size": 2}
            rows, more = rows.select_columns("prompt"), {"reward_funcs": lambda completions, **_: [1.0] * 2}
        args = config(str(run), **{"use_cpu": True, "disable_tqdm": True, **settings})
        words = tiny_tokenizer()
        return kind(str(tmp_path / "model"), args=args, train_dataset=rows, processing_class=words, **more)

    made = resumed(inner, 1)
    made.train()
    made.save_model()
    assert made.args.model_init_kwargs["token"] == SECRETS[0] and made.args.hub_token == SECRETS[1]
    assert (run / "training_args.bin").is_file()
    assert files_with(run, SECRETS) == []
    args = torch.load(run / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert args.model_init_kwargs == {"token": "<REDACTED>", "dtype": "float32"}
    with caplog.at_level(logging.WARNING):
        last = resumed({**inner, "token": "another"}, 2)
        last.train(resume_from_checkpoint=True)
    assert last.state.global_step == 2
    assert "model_init_kwargs" not in caplog.text


def test_a_secret_of_an_older_checkpoint_is_not_logged(folder, caplog):
    file = folder / "checkpoint-2" / "checkpoint.json"
    manifest = json.loads(file.read_text())
    manifest["settings"]["model_init_kwargs"] = {"token": SECRETS[0], "dtype": "float32"}
    file.write_text(json.dumps(manifest))
    with caplog.at_level(logging.WARNING):
        assert resume(folder).state.global_step == 3
    assert "model_init_kwargs: {'token': '<REDACTED>', 'dtype': 'float32'}, now" in caplog.text


def test_what_is_pushed_holds_no_secret(tmp_path, monkeypatch):
    hub = Mock()
    hub.create_repo.return_value.repo_id = "me/x"
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    settings = {**SAVED, "hub_token": SECRETS[1], "push_to_hub": True, "hub_model_id": "me/x"}
    make(ROWS, folder=tmp_path, **settings).train()
    assert {call.kwargs["token"] for call in hub.upload_folder.call_args_list} == {SECRETS[1]}
    assert files_with(tmp_path, SECRETS) == []


def test_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"output_dir='.*/out' is a link to '.*/gone', which is missing"):
        make(ROWS, folder=tmp_path / "out")


class FakeClock(datetime):
    day = 24

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, cls.day)


DATED = """{{ strftime_now("%d %b %Y") }}{% for m in messages %}{{ m['content'] }}{% endfor %}"""


@pytest.mark.parametrize("workers", [None, 2])
def test_a_run_keeps_the_date_of_its_chat_template(workers, tmp_path, monkeypatch):
    for module in (progress, transformers.utils.chat_template_utils):
        monkeypatch.setattr(module, "datetime", FakeClock)
    rows = [{"messages": [{"role": "user", "content": text["text"]}]} for text in ROWS]

    def dated(day, folder, steps=2, **settings):
        monkeypatch.setattr(FakeClock, "day", day)
        words = tiny_tokenizer()
        words.chat_template = DATED
        settings = {**SAVED, "max_steps": steps, "dataset_num_proc": workers, **settings}
        return make(rows, tokenizer=words, folder=folder, **settings)

    first, other = dated(24, tmp_path / "run"), dated(25, tmp_path / "other")
    ids = first.train_dataset["input_ids"][0]
    assert first._tokenizer.decode(ids).startswith("24 Nov 2026")
    assert other._tokenizer.decode(other.train_dataset["input_ids"][0]).startswith("25 Nov 2026")
    first.train()
    again = dated(25, tmp_path / "run", 3, resume_from_checkpoint=True)
    assert again.train_dataset["input_ids"][0] == ids
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    checkpoint = str(tmp_path / "run" / "checkpoint-3")
    with pytest.raises(CheckpointError, match=r"date 2026-11-24 in its chat template.*resume_from_checkpoint="):
        dated(25, tmp_path / "third", 4).train(resume_from_checkpoint=checkpoint)
    named = dated(25, tmp_path / "third", 4, resume_from_checkpoint=checkpoint)
    named.train(resume_from_checkpoint=checkpoint)
    assert named.state.global_step == 4
