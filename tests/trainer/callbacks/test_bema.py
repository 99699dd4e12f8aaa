"""BEMA: the update by hand, snapshots, resuming to the same bits."""

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer import sft_runs
from tests.trainer.callbacks.runs import trainer
from trl.trainer.callbacks import BEMACallback


def drive(callback, weights):
    """Feed a one-weight model's path, beginning before step 1; returns the running weight after each step."""
    model = torch.nn.Linear(1, 1, bias=False)
    seen = []
    for step, weight in enumerate(weights):
        model.weight.data.fill_(weight)
        event = callback.on_step_end if step else callback.on_train_begin
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        event(SimpleNamespace(output_dir="unused"), state, None, model=model)
        seen.append(callback.running_model.weight.item())
    return seen


def test_by_hand():
    """lag 1, both powers 1: beta = alpha = 1 / (1 + t)."""
    callback = BEMACallback(update_freq=1, ema_power=1.0, bias_power=1.0, lag=1)
    # t=1: EMA (2+4)/2 = 3, BEMA 3 + (4-2)/2 = 4.  t=2: EMA 2/3*3 + 6/3 = 4, BEMA 4 + (6-2)/3
    assert drive(callback, [2.0, 4.0, 6.0]) == pytest.approx([2.0, 4.0, 16 / 3])
    assert callback.ema["weight"].item() == pytest.approx(4.0)


def test_the_averages_begin_after_the_burn_in():
    callback = BEMACallback(update_freq=1, ema_power=1.0, bias_power=1.0, lag=1, update_after=2)
    # start and EMA are 10 at t=2; t=3: EMA 3/4*10 + 14/4 = 11, BEMA 11 + (14-10)/4
    assert drive(callback, [0.0, 5.0, 10.0, 14.0]) == pytest.approx([0.0, 0.0, 10.0, 12.0])


@pytest.mark.parametrize("options", [{"update_freq": 0}, {"lag": 0}, {"min_ema_multiplier": 1.5}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        BEMACallback(**options)


def test_a_run_saves_its_average(tmp_path):
    callback = BEMACallback(update_freq=1)
    run = trainer(tmp_path, callbacks=[callback])
    frozen = run.model.lm_head.weight.requires_grad_(False)
    run.train()
    assert "lm_head.weight" not in callback.ema
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "bema")
    expected = dict(callback.running_model.named_parameters())
    for name, value in saved.named_parameters():
        torch.testing.assert_close(value, expected[name], atol=0, rtol=0)
    assert torch.equal(saved.lm_head.weight, frozen)
    trained = run.model.model.norm.weight
    assert not torch.equal(saved.model.norm.weight, trained)
    assert (saved.model.norm.weight - trained).abs().max() < 0.1


def test_resumed_training_ends_in_the_same_average(tmp_path):
    def run(folder, resume=None, stop=None):
        callback = BEMACallback(update_freq=1, update_after=1)
        trained = trainer(
            folder,
            callbacks=[callback],
            save_strategy="steps",
            save_steps=2,
            steps=stop or 4,
            lr_scheduler_type="constant",
        )
        trained.train(resume_from_checkpoint=resume)
        return dict(callback.running_model.named_parameters())

    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", stop=2)
    resumed = run(tmp_path / "cut", resume=str(tmp_path / "cut" / "checkpoint-2"))
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, atol=0, rtol=0)


def test_a_run_resumed_in_another_folder_ends_in_the_same_average(tmp_path):
    def run(folder, resume=None):
        callback, rows = BEMACallback(update_freq=1, update_after=1), [{"text": "one two"}, {"text": "three four"}]
        settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 1}
        run = sft_runs.make(rows, folder=tmp_path / folder, trainer={"callbacks": [callback]}, **settings)
        run.train(resume_from_checkpoint=resume)
        return dict(callback.running_model.named_parameters())

    whole, resumed = run("a"), run("b", resume=str(tmp_path / "a" / "checkpoint-2"))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_checkpoint_without_averages_is_said(tmp_path, caplog):
    callback = BEMACallback()
    state = SimpleNamespace(global_step=3, is_world_process_zero=True)
    with caplog.at_level(logging.WARNING):
        callback.on_train_begin(SimpleNamespace(output_dir=tmp_path), state, None, model=torch.nn.Linear(1, 1))
    assert "begin again" in caplog.text


def test_sharded_weights_are_refused():
    model = torch.nn.Linear(1, 1)
    model.weight.ds_id = 0
    with pytest.raises(ValueError, match="whole weights"):
        BEMACallback().on_train_begin(None, SimpleNamespace(global_step=0), None, model=model)
