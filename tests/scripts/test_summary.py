from types import SimpleNamespace

import pytest

from trl.scripts.summary import final_metrics, finish, summary

HISTORY = [
    {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-5, "epoch": 0.5, "step": 1},
    {"loss": 1.25, "mean_token_accuracy": 0.5, "epoch": 1.0, "step": 2},
    {"eval_loss": 1.5, "eval_runtime": 0.1, "eval_samples_per_second": 9.0, "epoch": 1.0, "step": 2},
    {"train_runtime": 3.0, "train_loss": 1.6, "total_flos": 1.0, "train_steps_per_second": 3.0, "step": 2},
]


def test_the_last_value_of_each_measure_of_quality():
    measures = {"loss": 1.25, "mean_token_accuracy": 0.5, "eval_loss": 1.5, "train_loss": 1.6}
    assert final_metrics(HISTORY) == measures


def test_the_last_lines_say_where_the_model_is_and_how_to_go_on():
    lines = summary("out", HISTORY, command="sft")
    assert lines[0] == "Model saved in out"
    assert lines[1] == "Final metrics: loss 1.25, mean_token_accuracy 0.5, eval_loss 1.5, train_loss 1.6"
    assert lines[2].startswith("To go on: trl sft")
    assert len(summary("out", [], command="sft")) == 2


@pytest.mark.parametrize(("max_steps", "longer"), [(-1, "--num_train_epochs"), (20, "--max_steps")])
def test_the_option_that_makes_a_run_longer_is_the_one_that_ended_it(capsys, max_steps, longer):
    args = SimpleNamespace(output_dir="out", push_to_hub=False, max_steps=max_steps)
    accelerator = SimpleNamespace(is_main_process=True, end_training=lambda: None)
    state = SimpleNamespace(log_history=[])
    trainer = SimpleNamespace(
        args=args, accelerator=accelerator, state=state, save_model=lambda output_dir: None
    )
    finish(trainer, dataset_name=None, command="dpo")
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"To go on: trl dpo with the same options, a larger {longer} and --resume_from_checkpoint true"
    )
