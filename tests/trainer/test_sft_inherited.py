"""Settings that are transformers' own, on supervised fine-tuning: each layout of the rows is evaluated and goes on alike."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.inherited_worker import packed_rows
from tests.trainer.sft_runs import make, model_for
from trl.trainer.loaders import order_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "padding-free": {"padding_free": True},
    "packed": {"packing": True, "max_length": 24},
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def found_by(layout: str, *, test: Any = None, **settings: Any) -> tuple[Any, Mapping[str, float]]:
    """What `compute_metrics` was given of seven sequences, and the metrics."""
    kept = []
    trainer = make(
        packed_rows(),
        trainer={
            "eval_dataset": packed_rows(),
            "compute_metrics": lambda found: kept.append(found) or {"rows": len(found.predictions)},
        },
        **{**LAYOUTS[layout], **settings},
    )
    metrics = trainer.evaluate()
    return kept[0], metrics


def in_order(ids: Any) -> list[list[int]]:
    """The sequences without their padding, sorted: packing reorders them."""
    return sorted(row[row >= 0].tolist() for row in np.asarray(ids))


# ---- evaluation


@every_layout
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_metrics_are_given_every_sequence_once(layout, rows):
    """Three packed rows hold seven sequences; the last batch of two has one row, that of eight has three."""
    found, metrics = found_by(layout, per_device_eval_batch_size=rows)
    expected = sorted(row["input_ids"][1:] for row in packed_rows())
    assert metrics["eval_rows"] == len(expected) == 7
    assert in_order(found.label_ids[:, 1:]) == expected
    trained = found.label_ids[:, 1:] != -100
    hits = (found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:])[trained].sum()
    assert metrics["eval_mean_token_accuracy"] == pytest.approx(hits / trained.sum(), abs=1e-9)


def test_predictions_of_packed_rows_are_those_of_the_rows_alone():
    found, alone = (found_by(layout)[0] for layout in ("packed", "padded"))

    def summed(given):
        real = given.predictions[..., 0] != -100
        trained = given.label_ids[:, 1:] != -100
        assert real[:, :-1][trained].all()
        return sorted((row[:-1][mask].sum(), mask.sum()) for row, mask in zip(given.predictions, trained, strict=True))

    torch.testing.assert_close(torch.tensor(summed(found)), torch.tensor(summed(alone)), rtol=0, atol=1e-3)


@every_layout
def test_rows_of_a_stream_are_counted(layout):
    trainer = make(
        packed_rows(),
        per_device_eval_batch_size=2,
        trainer={"eval_dataset": packed_rows().to_iterable_dataset()},
        **LAYOUTS[layout],
    )
    found = trainer.evaluation_loop(trainer.get_eval_dataloader(), "by hand", None, None, "hand")
    assert found.num_samples == (3 if layout == "packed" else 7)


def test_a_set_that_is_larger_than_a_batch_of_the_trainer_is_predicted_whole():
    trainer = make(packed_rows(), per_device_eval_batch_size=2)
    loader = torch.utils.data.DataLoader(list(packed_rows()), batch_size=5, collate_fn=trainer.data_collator)
    found = trainer.evaluation_loop(loader, "by hand", False, None, "hand")
    assert len(found.predictions) == len(found.label_ids) == 7


@every_layout
def test_no_row_is_dropped_from_an_evaluation(layout):
    found = found_by(layout, dataloader_drop_last=True)[1]
    expected = found_by(layout)[1]
    for name in ("eval_loss", "eval_entropy", "eval_rows"):
        assert found[name] == expected[name], name


def test_tokens_that_are_given_are_cut_like_those_of_the_constructor():
    settings = {"max_length": 8, "trainer": {"eval_dataset": packed_rows()}}
    trainer, whole = make(packed_rows(), **settings), make(packed_rows(), max_length=None)
    expected = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(packed_rows())["eval_loss"] == expected
    found = trainer.predict(packed_rows())
    assert found.metrics["test_loss"] == expected and found.label_ids.shape == (7, 8)
    assert trainer._sets.later(trainer.eval_dataset) is trainer.eval_dataset
    assert whole.evaluate(packed_rows())["eval_loss"] != pytest.approx(expected, abs=1e-3)


# ---- going on

WITHIN_AN_EPOCH: dict[str, tuple[int, dict[str, Any]]] = {
    "first, workers that stay": (2, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}),
    "second, an order that is not seeded": (5, {"accelerator_config": {"use_seedable_sampler": False}}),
}


@pytest.mark.parametrize("epoch", WITHIN_AN_EPOCH)
def test_a_run_with_dropout_goes_on_to_the_same_bits(epoch, tmp_path):
    """Seven rows are four steps; what is drawn at the beginning of the second epoch depends on nothing before."""
    at, given = WITHIN_AN_EPOCH[epoch]
    settings = {
        **given, "max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1,
        "folder": tmp_path,
    }  # fmt: skip
    whole, resumed = (make(packed_rows(), model=model_for(attention_dropout=0.1), **settings) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())
    assert resumed.state.log_history[-1]["train_loss"] == whole.state.log_history[-1]["train_loss"]


# ---- settings that do not apply


def test_rows_are_ordered_by_the_tokens_that_they_have():
    sized = packed_rows().add_column("length", list(range(7)))  # type: ignore[call-arg]
    trainer = make(sized, train_sampling_strategy="group_by_length")
    assert list(order_of(trainer.get_train_dataloader()).lengths) == [len(row["input_ids"]) for row in packed_rows()]


# ---- several processes: the slow test of two is test_inherited_settings.py's
