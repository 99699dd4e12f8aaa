"""GRPO and RLOO under settings of `transformers.TrainingArguments`: what does not alter the mathematics alters no bit of it."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from tests.tiny import tiny_model
from tests.trainer.grpo_runs import END, even_tokens, logs, make, prompts, run
from tests.trainer.resume_worker import tokenizer
from trl.trainer.callbacks.checkpoints import CheckpointOnSignal

# Two windows of two mini-batches, learned from twice, each mini-batch in two micro-batches.
CUT = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2,
    "max_steps": 6, "learning_rate": 0.02, "optim": "adamw_torch",
}  # fmt: skip
SILENT = {
    "dataloader_num_workers": 2, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3,
    "dataloader_drop_last": True, "train_sampling_strategy": "group_by_length", "ignore_data_skip": True,
    "remove_unused_columns": True, "label_names": ["labels"], "label_smoothing_factor": 0.1, "prediction_loss_only": True,
    "include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1, "auto_find_batch_size": True,
}  # fmt: skip


def with_dropout() -> nn.Module:
    model = tiny_model("gpt2", dtype=torch.float64)
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.1
    return model


def found(method: str, **settings: Any) -> tuple[list, list]:
    """Gradients and logs of a run with dropout."""
    given = {"model": with_dropout(), **settings.pop("given", {})}
    trainer, keep = run(method, **{**CUT, **settings}, given=given)
    return keep.steps, logs(trainer)


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[list, list]]:
    return {method: found(method) for method in ("grpo", "rloo")}


def check_equal(one: tuple[list, list], other: tuple[list, list]) -> None:
    assert one[1] == other[1] and len(one[0]) == len(other[0]) == 6
    for own, theirs in zip(one[0], other[0], strict=True):
        assert all(torch.equal(own[name], theirs[name]) for name in own)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_settings_of_loaders_labels_and_predictions_have_no_effect(method, plain, caplog):
    sets = {"eval_dataset": prompts(3)}
    distribution = {"dispatch_batches": True, "even_batches": False}
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, "accelerator_config": distribution, "given": sets}
    check_equal(found(method, **SILENT, **evaluated), plain[method])
    said = [each.partition("=")[0] for each in caplog.messages if "has no effect" in each]
    assert sorted(said) == ["auto_find_batch_size", "label_smoothing_factor"]  # the others change no result


def test_evaluations_leave_the_training_its_random_numbers(plain):
    """Before the first step, after each, of several sets and by hand."""
    sets = {"a": prompts(3), "b": prompts(2)}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    given = {"model": with_dropout(), "eval_dataset": sets}
    trainer, keep = make("grpo", **CUT, **evaluated, given=given)
    trainer.evaluate(prompts(2))
    predicted = trainer.predict(prompts(3)).metrics
    trainer.train()
    check_equal((keep.steps, logs(trainer)), plain["grpo"])
    entries = [entry for entry in trainer.state.log_history if "eval_a_reward" in entry]
    assert [entry["step"] for entry in entries] == [0, 1, 2, 3, 4, 5, 6]
    assert entries[0]["eval_a_reward"] == predicted["test_reward"]


class Ask(TrainerCallback):
    """Asks for a checkpoint, as a signal does, just before an event of the step after some others."""

    def __init__(self, event: str, steps: int) -> None:
        self.trainer: Any = None
        setattr(self, event, lambda args, state, control, **_: self.ask(state.global_step == steps))

    def ask(self, now: bool) -> None:
        every = self.trainer.callback_handler.callbacks
        manager: Any = next(each._theirs.jit_manager for each in every if isinstance(each, CheckpointOnSignal))
        manager.is_checkpoint_requested = manager.is_checkpoint_requested or now


@pytest.mark.parametrize(("event", "steps", "saved"), [("on_step_begin", 4, 5), ("on_pre_optimizer_step", 1, 2)])
def test_a_checkpoint_on_a_signal_is_that_of_a_whole_step(event, steps, saved, tmp_path):
    """A window that was made and a micro-batch that was learned from count once in the run that goes on."""
    settings = {**CUT, "logging_steps": 4}
    whole, _ = run("grpo", **settings, given={"model": with_dropout()})
    settings["folder"] = str(tmp_path)
    ask = Ask(event, steps)
    given = {"model": with_dropout(), "callbacks": [ask]}
    ask.trainer, _ = make("grpo", **settings, enable_jit_checkpoint=True, given=given)
    ask.trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{saved}"]
    assert ask.trainer.state.global_step == saved
    trainer, _ = make("grpo", **settings, given={"model": with_dropout()})
    trainer.train(resume_from_checkpoint=True)
    assert logs(trainer) == logs(whole) and trainer.run_metrics.num_tokens() == whole.run_metrics.num_tokens()
    for own, theirs in zip(trainer.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(own, theirs)


def test_tokens_that_are_not_padding_are_told_by_position():
    """Prompts and completions hold the pad token's id, which is the end token's; no row is padded, and a group's prompt stands there once."""
    seen = []

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            seen.append(state.num_input_tokens_seen)

    given = {"callbacks": [Count()], "processing_class": tokenizer()}
    given["processing_class"].pad_token = END
    pad = given["processing_class"].pad_token_id
    trainer, _ = make("grpo", **CUT, include_num_input_tokens_seen="non_padding", given=given)
    batches, training_step = [], trainer.training_step
    trainer.training_step = lambda *args: batches.append(args[1]["input_ids"]) or training_step(*args)
    trainer.train()
    assert sum((batch == pad).sum() for batch in batches) > 0
    assert seen[-1] == sum(batch.numel() for batch in batches) > 0


def test_what_was_clipped_does_not_count_in_a_second_run():
    """Nor what an evaluation that was broken off had measured."""
    fails = False

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        if fails:
            raise RuntimeError("no judge there")
        return even_tokens(completion_ids)

    settings = {**CUT, "learning_rate": 0.0, "logging_steps": 4, "top_k": 20, "per_device_eval_batch_size": 4}
    trainer, _ = make("grpo", reward_funcs=reward, **settings)
    trainer.train()
    first = logs(trainer)
    trainer._sums["train"].add(extremes={"clip_ratio/low_min": torch.tensor(-0.5)})  # after the last log
    fails = True
    with pytest.raises(Exception, match="no judge there"):
        trainer.evaluate(prompts(3))
    fails = False
    trainer.train()
    assert logs(trainer) == first


def test_a_reference_without_effect_is_refused():
    with pytest.raises(ValueError, match=r"ref_model was given with beta=0\.0"):
        make("grpo", beta=0.0, given={"ref_model": tiny_model("gpt2", dtype=torch.float64)})


def test_settings_of_references_and_tools_that_nobody_reads_say_so():
    with pytest.warns(UserWarning) as said:
        make("rloo", ref_model_sync_steps=3, ref_model_mixup_alpha=0.5, tool_deadline=5.0)
    assert [str(each.message).partition(". ")[0] for each in said if "has no effect" in str(each.message)] == [
        "tool_deadline=5.0 has no effect without tools",
        "ref_model_mixup_alpha=0.5 has no effect with sync_ref_model=False",
        "ref_model_sync_steps=3 has no effect with sync_ref_model=False",
    ]


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_steps_that_do_not_divide_a_generation_are_generated_together(method):
    with pytest.warns(UserWarning, match=r"completions of 6 micro-batches \(3 optimiser steps\) are generated at once"):
        trainer, _ = make(method, steps_per_generation=3, gradient_accumulation_steps=2, max_steps=4)
    windows = []
    make_rollout_batch = trainer.make_rollout_batch
    trainer.make_rollout_batch = lambda number: windows.append(trainer.state.global_step) or make_rollout_batch(number)
    trainer.train()
    assert windows == [0, 3]
