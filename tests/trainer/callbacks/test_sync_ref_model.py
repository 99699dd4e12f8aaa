"""The reference moves towards the policy by alpha, when it is due."""

from types import SimpleNamespace

import pytest
import torch

from trl.experimental.bema_for_ref_model import BEMACallback
from trl.models.reference import AdapterReference, FrozenModel, attach_reference
from trl.trainer.callbacks import SyncRefModelCallback


def pair():
    policy, reference = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for value, model in ((4.0, policy), (2.0, reference)):
        torch.nn.init.constant_(model.weight, value)
        torch.nn.init.constant_(model.bias, -value)
    return policy, reference


def test_by_hand():
    policy, reference = pair()
    SyncRefModelCallback.sync_target_model(policy, reference, 0.75)
    assert (reference.weight.item(), reference.bias.item()) == (3.5, -3.5)
    assert policy.weight.item() == 4.0
    SyncRefModelCallback.sync_target_model(policy, reference, 1.0)
    assert torch.equal(reference.weight, policy.weight)


@pytest.mark.parametrize(("step", "expected"), [(1, 2.0), (2, 3.0), (3, 2.0), (4, 3.0)])
def test_only_when_due(step, expected):
    policy, reference = pair()
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    args = SimpleNamespace(ref_model_sync_steps=2, ref_model_mixup_alpha=0.5)
    callback = SyncRefModelCallback(reference, accelerator)
    callback.on_step_end(args, SimpleNamespace(global_step=step), None, model=policy)
    assert reference.weight.item() == expected
    SyncRefModelCallback(None, None).on_step_end(args, SimpleNamespace(global_step=2), None, model=policy)


def test_other_parameters_are_refused():
    with pytest.raises(ValueError, match=r"bias.*sync_ref_model"):
        SyncRefModelCallback.sync_target_model(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, bias=False), 0.5)


def test_a_trainers_reference_is_lent_to_it():
    policy, module = pair()
    reference = FrozenModel(module, None)
    callback = SyncRefModelCallback(None, None)
    assert attach_reference([object(), callback], reference) is reference
    args = SimpleNamespace(ref_model_sync_steps=1, ref_model_mixup_alpha=0.5)
    callback.on_step_end(args, SimpleNamespace(global_step=1), None, model=policy)
    assert module.weight.item() == 3.0
    assert attach_reference([object()], reference) is None


@pytest.mark.parametrize("reference", [None, AdapterReference(None)])
def test_a_reference_that_cannot_move_is_refused(reference):
    with pytest.raises(ValueError, match=r"SyncRefModelCallback .*sync_ref_model"):
        attach_reference([SyncRefModelCallback(None, None)], reference)


def test_two_that_move_the_reference_are_refused():
    """TR-DPO beside BEMA: each would undo what the other writes."""
    reference = FrozenModel(pair()[1], None)
    bema = BEMACallback(update_ref_model=True)
    with pytest.raises(ValueError, match="BEMACallback and SyncRefModelCallback move the reference's weights, one"):
        attach_reference([bema, SyncRefModelCallback(None, None)], reference)
    watching = BEMACallback(update_ref_model=False)
    assert attach_reference([watching, SyncRefModelCallback(None, None)], reference) is reference


def test_a_moved_reference_goes_on_from_its_checkpoint(tmp_path):
    """Four synced steps, and two, a file and two more, end in the same bits."""

    def steps(reference, policy, first, last, alpha=0.3):
        for step in range(first, last):
            policy.weight.data.mul_(1 + 1 / step)
            SyncRefModelCallback.sync_target_model(policy, reference.module, alpha)

    policy, module = pair()
    whole = FrozenModel(module, None)
    steps(whole, policy, 1, 5)
    policy, module = pair()
    cut = FrozenModel(module, None)
    steps(cut, policy, 1, 3)
    cut.save(tmp_path)
    resumed = FrozenModel(pair()[1], None)
    resumed.load(tmp_path)
    steps(resumed, policy, 3, 5)
    assert torch.equal(resumed.module.weight, whole.module.weight)
    assert torch.equal(resumed.module.bias, whole.module.bias)
