"""BEMA's average becomes the reference when it is due."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.callbacks.runs import trainer
from tests.two_processes import launch
from trl.experimental.bema_for_ref_model import BEMACallback
from trl.models.reference import FrozenModel, attach_reference
from trl.trainer.callbacks import BEMACallback as PlainBEMACallback

BY_HAND = {"update_freq": 1, "ema_power": 1.0, "bias_power": 1.0, "lag": 1}


def drive(weights, *, is_main=True, **options):
    """Feed a one-weight model's path; the reference's weight after each step."""
    callback = BEMACallback(**BY_HAND, **options)
    reference = FrozenModel(torch.nn.Linear(1, 1, bias=False), None)
    reference.module.weight.data.fill_(-1.0)
    attach_reference([callback], reference)
    model = torch.nn.Linear(1, 1, bias=False)
    seen = []
    for step, weight in enumerate(weights):
        model.weight.data.fill_(weight)
        event = callback.on_step_end if step else callback.on_train_begin
        state = SimpleNamespace(global_step=step, is_world_process_zero=is_main)
        event(SimpleNamespace(output_dir="unused"), state, None, model=model)
        seen.append(reference.module.weight.item())
    return seen


def test_by_hand():
    """The averages of `tests/trainer/callbacks/test_bema.py`: 4 after one step, 16/3 after two."""
    found = drive([2.0, 4.0, 6.0], update_ref_model=True, ref_model_update_freq=1)
    assert found == pytest.approx([-1.0, 4.0, 16 / 3])


def test_only_when_due():
    path, options = [2.0, 4.0, 6.0, 6.0, 6.0], {"update_ref_model": True, "ref_model_update_freq": 2}
    found = drive(path, **options)
    assert found[:4] == pytest.approx([-1.0, -1.0, 16 / 3, 16 / 3])
    assert found[4] != found[3]
    third = drive(path, update_ref_model=True, ref_model_update_freq=1)[3]
    assert drive(path, ref_model_update_after=3, **options) == pytest.approx([-1.0] * 3 + [third] * 2)
    assert drive(path) == [-1.0] * 5


def test_it_needs_a_reference_of_the_same_weights(tmp_path):
    with pytest.raises(ValueError, match="hands out none"):
        trainer(tmp_path, callbacks=[BEMACallback(update_ref_model=True)]).train()
    callback = BEMACallback(**BY_HAND, update_ref_model=True, ref_model_update_freq=1)
    attach_reference([callback], FrozenModel(torch.nn.Linear(1, 1, bias=False), None))
    state = SimpleNamespace(global_step=1, is_world_process_zero=False)
    with pytest.raises(ValueError, match=r"\['bias'\]"):
        callback.on_step_end(SimpleNamespace(), state, None, model=torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ref_model_update_freq"):
        BEMACallback(ref_model_update_freq=0)


def test_without_update_ref_model_it_is_the_plain_one(tmp_path):
    callback = BEMACallback(update_freq=1)
    assert isinstance(callback, PlainBEMACallback)
    assert attach_reference([callback], None) is None
    trainer(tmp_path, callbacks=[callback]).train()
    assert (tmp_path / "bema").is_dir()


@pytest.mark.slow
@pytest.mark.distributed
def test_both_processes_get_the_main_ones_average(tmp_path):
    launch("tests.experimental.bema_for_ref_model.test_callback", str(tmp_path))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1] == pytest.approx([-1.0, 4.0, 16 / 3])


def main(out: str) -> None:
    from accelerate import PartialState

    state = PartialState(cpu=True)
    found = drive([2.0, 4.0, 6.0], is_main=state.is_main_process, update_ref_model=True, ref_model_update_freq=1)
    (Path(out) / f"{state.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
