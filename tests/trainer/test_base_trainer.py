"""What every trainer shares: sums over a run, and what happens where there is nothing to sum."""

import gc
import json
import math
import os
import weakref
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer import grpo_runs
from tests.trainer.preference_methods import METHODS
from tests.trainer.sft_runs import config, logged, make, model_for
from tests.two_processes import launch
from trl import SFTConfig, SFTTrainer
from trl.checkpoints.wholeness import CheckpointError
from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.trainer.inherited import settle_inherited
from trl.trainer.loaders import on_device

SETTINGS = {"max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3}


def rows(count=12):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 10, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, 300, (n,), generator=generator).tolist()} for n in lengths]


class NothingTrained:
    """A collator whose batches have no trained token."""

    def __call__(self, features):
        batch = DataCollatorForLanguageModeling(pad_token_id=0)(features)
        return {**batch, "labels": torch.full_like(batch["labels"], -100)}


@pytest.mark.parametrize("save_only_model", [True, False])
def test_the_mean_loss_leaves_out_steps_that_a_checkpoint_does_not_know(tmp_path, save_only_model, caplog):
    settings = {**SETTINGS, "logging_steps": 2, "save_only_model": save_only_model, "folder": tmp_path}
    make(rows(), **{**settings, "max_steps": 3}).train()
    if not save_only_model:
        (tmp_path / "checkpoint-3" / "progress_0.json").unlink()
    parts = ["optimizer", "random_state"] if save_only_model else ["progress"]
    with pytest.raises(CheckpointError, match=rf"checkpoint-3 is not whole.*resume_without=\['{parts[0]}'"):
        make(rows(), **settings).train(resume_from_checkpoint=True)
    trainer = make(rows(), **settings, resume_without=parts)
    output = trainer.train(resume_from_checkpoint=True)
    step_4, steps_5_and_6 = logged(trainer, "loss")[1:]
    assert output.training_loss == pytest.approx((step_4 + 2 * steps_5_and_6) / 3)
    assert logged(trainer, "train_loss") == [output.training_loss]
    assert f"resume_without: {' and '.join(parts)} of {tmp_path}/checkpoint-3 start anew" in caplog.text


def test_an_overridden_log_may_rename_the_summary(monkeypatch):
    expected = make(rows(), max_steps=2).train()
    log = SFTTrainer.log

    def prefixed(self, logs, start_time=None):
        log(self, {f"stage1/{name}": value for name, value in logs.items()}, start_time)

    monkeypatch.setattr(SFTTrainer, "log", prefixed)
    output = make(rows(), max_steps=2).train()
    assert output.training_loss == output.metrics["train_loss"] == expected.training_loss


def test_a_batch_may_hold_texts_under_the_names_of_log_probs():
    trainer = make(rows(), max_steps=1)
    batch = {"ref_text": ["a", "b"], "ref_chosen_logps": torch.ones(2, dtype=torch.float64)}
    found = on_device(trainer, batch)
    assert found["ref_text"] == ["a", "b"] and found["ref_chosen_logps"].dtype == torch.float64


def test_log_probs_of_others_keep_their_precision_where_deepspeed_casts_a_batch(monkeypatch):
    trainer = make(rows(), max_steps=1)
    cast = lambda batch: {k: v.bfloat16() if k in ("ref_logps", "values") else v for k, v in batch.items()}  # noqa: E731
    monkeypatch.setattr(trainer, "_prepare_inputs", cast)
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    exact = torch.full((2,), 1 / 3, dtype=torch.float64)
    found = on_device(trainer, {"ref_logps": exact, "values": exact, "ref_text": ["a", "b"]})
    assert torch.equal(found["ref_logps"], exact)
    again = trainer.take_batch(trainer._prepare_inputs(found))  # as in a training step of transformers
    assert torch.equal(again["ref_logps"], exact) and again["values"].dtype == torch.bfloat16


METHODS_OF_RUNS = {**METHODS, "grpo": (grpo_runs.make, {}), "rloo": (grpo_runs.make, {"method": "rloo"})}


@pytest.mark.parametrize("name", ["dpo-sigmoid", "kto", "reward", "prm", "orpo", "grpo", "rloo"])
def test_the_summary_has_the_metrics_of_steps_that_were_not_logged(name, tmp_path):
    make_trainer, settings = METHODS_OF_RUNS[name]
    summaries = []
    for step in (1, 10):  # logged as the step's loss, and in the summary alone
        made = make_trainer(**{**settings, "max_steps": 1, "logging_steps": step})
        trainer = made[0] if isinstance(made, tuple) else made
        output = trainer.train()
        summaries.append([trainer.state.log_history, output.metrics])
    (logged_step, _), (only, metrics) = summaries
    clocks = ("loss", "grad_norm", "learning_rate", "step_time", "epoch", "step")
    expected = {k: v for k, v in logged_step[0].items() if not any(word in k for word in clocks)}
    assert len(only) == 1 and len(expected) >= 2 and "num_tokens" in expected
    assert {key: only[0][key] for key in expected} == pytest.approx(expected, rel=1e-12)
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-12)


def test_float16_weights_are_not_trained_on_a_cpu(tmp_path):
    trainer = make(rows(), model=tiny_model("llama", vocab_size=400, dtype=torch.float16), folder=tmp_path, **SETTINGS)
    with pytest.raises(ValueError, match=r"the trained weights are float16.*Load them in bfloat16 or float32"):
        trainer.train()


def test_a_frozen_model_is_refused_before_the_first_step(tmp_path):
    model = tiny_model("llama", vocab_size=400).requires_grad_(False)
    trainer = make(rows(), model=model, folder=tmp_path, **SETTINGS)
    assert trainer.evaluate(Dataset.from_list(rows(2)))["eval_loss"] > 0
    with pytest.raises(ValueError, match=r"every parameter of LlamaForCausalLM is frozen.*Unfreeze"):
        trainer.train()


def test_dropping_every_row_is_refused(tmp_path):
    settings = {**SETTINGS, "per_device_train_batch_size": 5, "dataloader_drop_last": True, "max_steps": 1}
    with pytest.raises(ValueError, match="drops all 4 training rows: they do not fill a batch of 5"):
        make(rows(4), folder=tmp_path, **settings).train()
    assert make(rows(5), folder=tmp_path, **settings).train().global_step == 1


class Stream(IterableDataset):
    """Seven rows without a length."""

    def __iter__(self):
        yield from rows(7)


class OwnLoader(SFTTrainer):
    """A trainer with a loader of a program's own."""

    def get_train_dataloader(self):
        loader = DataLoader(Stream(), batch_size=2, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


def test_a_training_loader_of_a_program_may_end_and_have_no_length(tmp_path):
    tokenizer = tiny_tokenizer()
    settings, data = {**SETTINGS, "save_strategy": "no"}, Dataset.from_list(rows())
    args, model = config(tmp_path, **settings), model_for(tokenizer)
    trainer = OwnLoader(model, args, train_dataset=data, processing_class=tokenizer)
    assert trainer.train().global_step == 6


def test_a_step_that_trains_nothing_has_no_loss_and_no_gradient(tmp_path):
    model = tiny_model("qwen3_moe", vocab_size=400, output_router_logits=True)
    settings = {**SETTINGS, "save_strategy": "no", "max_steps": 2, "gradient_accumulation_steps": 2}
    trainer = make(rows(), model=model, folder=tmp_path, trainer={"data_collator": NothingTrained()}, **settings)
    trainer.train()
    assert logged(trainer, "loss") == [0.0, 0.0]
    assert logged(trainer, "grad_norm") == [0.0, 0.0]
    assert logged(trainer, "mean_token_accuracy") == []


def test_an_evaluation_that_scores_nothing_has_no_loss(tmp_path, caplog):
    trainer = make(rows(), folder=tmp_path, trainer={"data_collator": NothingTrained()}, **SETTINGS)
    metrics = trainer.evaluate(Dataset.from_list(rows(3)))
    assert math.isnan(metrics["eval_loss"])  # 0.0 would be the best of all checkpoints
    assert "no trained token" in caplog.text
    assert "eval_loss" not in trainer.evaluate(Dataset.from_list(rows(1)).select([]))


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_half_written(tmp_path):
    trainer = make(rows(), folder=tmp_path, **SETTINGS, save_total_limit=1)
    inner = trainer._save_optimizer_and_scheduler

    def save(folder):
        if trainer.state.global_step > 3:
            raise OSError(28, "No space left on device")
        inner(folder)

    trainer._save_optimizer_and_scheduler = save
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "checkpoint-3", "run.jsonl"]
    assert trainer.args.save_total_limit == 1
    assert make(rows(), folder=tmp_path, **SETTINGS).train(resume_from_checkpoint=True).global_step == 6


class ClockSetBack(TrainerCallback):
    """Every checkpoint is a day older than the one before it."""

    def on_save(self, args, state, control, **kwargs):
        time = 1e9 - 86_400 * state.global_step
        os.utime(Path(args.output_dir) / f"checkpoint-{state.global_step}", (time, time))


@pytest.mark.parametrize("limit", [1, 2])
def test_a_clock_set_back_does_not_remove_the_newest_checkpoint(limit, tmp_path):
    settings = {**SETTINGS, "save_steps": 1, "save_total_limit": limit}
    make(rows(), folder=tmp_path, trainer={"callbacks": [ClockSetBack()]}, **settings).train()
    left = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert left == {f"checkpoint-{6 - n}" for n in range(limit)}


def test_a_run_that_begins_anew_keeps_its_own_checkpoints(tmp_path):
    make(rows(), folder=tmp_path, **SETTINGS).train()
    settings = {**SETTINGS, "save_steps": 1, "max_steps": 2, "save_total_limit": 2}
    make(rows(), folder=tmp_path, **settings).train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}


def test_the_newest_checkpoint_is_kept_beside_the_best_at_the_end(tmp_path):
    settings = {
        **SETTINGS, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss",
        "greater_is_better": True, "save_total_limit": 1,
    }  # fmt: skip
    trainer = make(rows(), folder=tmp_path, trainer={"eval_dataset": Dataset.from_list(rows(3))}, **settings)
    trainer.train()
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-6"}


@pytest.mark.slow
@pytest.mark.distributed
def test_the_mean_loss_of_two_processes_does_not_depend_on_logging(tmp_path):
    losses = []
    for strategy in ("no", "steps"):
        out = tmp_path / f"{strategy}.pt"
        settings = {"per_device_train_batch_size": 4, "max_steps": 2, "logging_strategy": strategy}
        launch("tests.trainer.one_step", str(out), json.dumps(settings))
        logs = torch.load(out, weights_only=False)
        losses.append(next(log["train_loss"] for log in logs if "train_loss" in log))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_several_gpus_in_one_process_are_not_copied_to(tmp_path, caplog):
    args = SFTConfig(str(tmp_path), use_cpu=True, report_to="none")
    args._n_gpu = 2
    settle_inherited(args, "rows")
    assert args.n_gpu == 1
    assert "2 GPUs are visible to this process and 1 is used" in caplog.text


def test_a_trainer_is_freed_with_its_last_use(tmp_path):
    """Its parts hold no reference to it: a cycle would keep its model, and the folder of an iterative run."""
    trainer = make(rows(), folder=tmp_path, max_steps=1)
    trainer.train()
    alive = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert alive() is None
    finally:
        gc.enable()
