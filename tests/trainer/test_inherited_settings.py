"""Settings that are transformers' own, on every trainer of preferences: what they change, and what they must not."""

import logging

import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from datasets import Dataset

from tests.tiny import tiny_model
from tests.trainer import cpo_runs, dpo_runs, kto_runs, prm_runs, reward_runs
from tests.trainer.inherited_worker import EVALUATIONS, SEQUENCES, evaluated, sft_evaluated
from tests.two_processes import launch
from trl.data.streaming import StreamRounds
from trl.trainer.loaders import order_of
from trl.trainer.samples import _some_rows

FEW = {
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 3,
    "learning_rate": 1e-2, "optim": "adamw_torch",
}  # fmt: skip
MAKERS = {
    "dpo": (dpo_runs.make, dpo_runs.pairs),
    "cpo": (cpo_runs.make, dpo_runs.pairs),
    "kto": (kto_runs.make, kto_runs.rows),
    "bco": (kto_runs.make_bco, kto_runs.rows),
    "reward": (reward_runs.make, reward_runs.rows),
    "prm": (prm_runs.make, prm_runs.rows),
}
every_trainer = pytest.mark.parametrize("method", MAKERS)


def build(method, out=None, **settings):
    """A trainer of eight fixed rows that is evaluated on seven others."""
    make, rows = MAKERS[method]
    settings.setdefault("eval_dataset", Dataset.from_list(rows(seed=9, count=7)))
    return make(out and str(out), **{**FEW, **settings})


def rows_of(method, **which):
    return Dataset.from_list(MAKERS[method][1](**which))


# ---- resuming


@pytest.mark.parametrize(("method", "steps", "streams"), [("dpo", 3, False), ("dpo", 2, False), ("bco", 3, True)])
def test_a_run_that_has_ended_trains_nothing_more(method, steps, streams, tmp_path):
    """Two steps make an epoch: the third is in the middle of one, where transformers would make a fourth."""
    data = rows_of(method)
    settings = {
        "train_dataset": data.to_iterable_dataset() if streams else data,
        "save_strategy": "steps",
        "max_steps": steps,
    }
    whole, again = (build(method, tmp_path, **settings) for _ in range(2))
    first = whole.train()
    assert first.training_loss > 0
    second = again.train(resume_from_checkpoint=True)
    assert second.global_step == steps and second.training_loss == first.training_loss
    assert again.run_metrics.num_tokens() == whole.run_metrics.num_tokens() > 0
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.model.state_dict().items())


# ---- evaluation


@pytest.mark.parametrize("method", ["kto", "prm"])
def test_persistent_workers_read_the_set_that_they_are_given(method):
    other = rows_of(method, seed=4, count=5)
    expected = [build(method).evaluate(given)["eval_loss"] for given in (None, other)]
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)
    trainer = build(method, dataloader_num_workers=1, dataloader_persistent_workers=True)
    found = [trainer.evaluate(given)["eval_loss"] for given in (None, other, None)]
    assert found == [*expected, expected[0]]
    assert trainer.evaluate({"b": other})["eval_b_loss"] == expected[1]
    assert len(trainer._eval_dataloaders) == 1  # that of the trainer's own set, whose workers wait
    (loader,) = trainer._eval_dataloaders.values()
    (worker,) = loader.base_dataloader._iterator._workers
    del trainer, loader
    assert worker.exitcode == 0  # at once: the garbage collector would wait for it for 5 s


@every_trainer
def test_rows_of_a_stream_are_counted(method):
    rows = rows_of(method, seed=9, count=7)
    trainer = build(method, eval_dataset=rows.to_iterable_dataset())
    found = trainer.evaluation_loop(trainer.get_eval_dataloader(), "by hand", None, None, "hand")
    assert found.num_samples == 7
    assert found.metrics["hand_loss"] == build(method).evaluate()["eval_loss"]


@pytest.mark.parametrize("method", ["dpo", "kto", "bco"])
def test_an_evaluation_in_bfloat16_is_held_against_a_reference_in_bfloat16(method):
    """Both are the same model before the first step: every reward is 0, and not what rounding one of them makes of it."""
    trainer = build(method, model=tiny_model("gpt2"), copied_reference=True, bf16_full_eval=True)
    found = trainer.evaluate()
    assert next(trainer.model.parameters()).dtype == torch.bfloat16
    assert [found["eval_rewards/chosen"], found["eval_rewards/rejected"]] == [0.0, 0.0]


# ---- order


def test_a_steps_rows_are_of_like_length():
    trainer = build("dpo", train_sampling_strategy="group_by_length", train_dataset=rows_of("dpo", count=64))
    lengths = [p + c + r for p, c, r in dpo_runs.LENGTHS] * 8
    order = list(order_of(trainer.get_train_dataloader()))
    assert sorted(order) == list(range(64)) and order != sorted(order)
    assert lengths[order[0]] == max(lengths)
    again = order_of(trainer.get_train_dataloader())
    assert list(again) == order
    again.set_epoch(1)
    assert list(again) != order and sorted(again) == list(range(64))
    steps = [[lengths[index] for index in order[at : at + 4]] for at in range(0, 64, 4)]
    differences = [max(step) - min(step) for step in steps[1:]]  # the longest row was moved into the first
    assert sum(differences) <= 60  # in an order drawn at random about 90


# ---- settings that do not apply


WARNED = {
    "auto_find_batch_size": True, "label_names": ["preferred"], "eval_use_gather_object": True, "label_smoothing_factor": 0.1,
}  # fmt: skip
REFUSED = {
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "train_sampling_strategy": {"train_sampling_strategy": "batch_rebalance"},
    "include_for_metrics": {"include_for_metrics": ["loss", "inputs"]},
}


def test_settings_without_effect_are_warned_of_once_and_reset(caplog):
    config = {"dispatch_batches": True, "use_seedable_sampler": False, "even_batches": False}
    with caplog.at_level(logging.WARNING, "trl"):
        trainer = build("dpo", **WARNED, accelerator_config=config)
    said = [message.partition("=")[0] for message in caplog.messages if " has no effect: " in message]
    assert sorted(said) == sorted([*WARNED, "dispatch_batches"])
    assert not trainer.args.auto_find_batch_size
    assert trainer.args.accelerator_config.use_seedable_sampler
    caplog.clear()
    build("dpo", label_names=["labels"])
    assert not [message for message in caplog.messages if "no effect" in message]


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_not_supported_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name}=.* is not supported: "):
        build("dpo", **REFUSED[name])


def test_no_hyperparameters_are_searched():
    with pytest.raises(TypeError, match="hyperparameter_search is not supported"):
        build("cpo", model=None, model_init=lambda: tiny_model("gpt2")).hyperparameter_search()


# ---- several processes


@pytest.mark.slow
def test_two_processes_count_each_row_once_and_go_on(tmp_path):
    """Of seven pairs two processes lack one, or five, for whole batches, which accelerate fills with the first ones."""
    out = tmp_path / "found.pt"
    launch("tests.trainer.inherited_worker", str(out), str(tmp_path))
    found, expected = torch.load(out), evaluated()
    assert expected["rows"] == 7
    for name in EVALUATIONS:
        assert found[name] == pytest.approx(expected, rel=0, abs=1e-9), name
    expected = sft_evaluated()
    assert expected["sequences"] == 7
    for name in SEQUENCES:
        assert found[name] == pytest.approx(expected, rel=0, abs=1e-6), name
    assert found["goes on"]
    assert found["refused"] == [True, True]


def test_samples_are_the_first_rows_of_a_stream_in_every_process():
    rows = [{"number": number} for number in range(5)]
    for process in range(2):
        part = IterableDatasetShard(StreamRounds(rows, 1, process=process, processes=2))
        assert _some_rows(part, 3, key=()) == rows[:3]
