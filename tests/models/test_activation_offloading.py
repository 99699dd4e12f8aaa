"""Offloaded activations: same gradients to the bit, each storage moved once, parameters and the head left alone.

The copies are exercised on a CPU by letting CPU tensors move (`stay_on = ()`); a CPU's streams run in order.
"""

import gc
import logging

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.tiny import tiny_model
from trl.models.activation_offloading import NoOpManager, OffloadActivations, get_act_offloading_ctx_manager

IDS = torch.tensor([[1, 7, 9, 4, 2, 11, 5, 3]])


def gradients(model, context=None):
    model.train()
    if context is None:
        model(input_ids=IDS, labels=IDS).loss.backward()
    else:
        with context:
            model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def moving(context):
    """The context, made to send CPU tensors away too, and the list of storages that it sends."""
    context.stay_on, sent, send = (), [], context._send

    def record(entry):
        sent.append(entry.device_bytes.numel())
        send(entry)

    context._send = record
    return context, sent


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_gradients_are_the_same_bits(streams, moves, checkpointing):
    plain, offloaded = tiny_model("llama"), tiny_model("llama")
    if checkpointing is not None:
        offloaded.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    context = get_act_offloading_ctx_manager(offloaded, use_streams=streams, min_offload_size=0, max_fwd_stash_size=1)
    sent = []
    if moves:
        context, sent = moving(context)
    torch.testing.assert_close(gradients(offloaded, context), gradients(plain), atol=0, rtol=0)
    assert bool(sent) == moves


def test_nothing_is_kept_after_the_backward():
    model = tiny_model("llama")
    context, sent = moving(get_act_offloading_ctx_manager(model, min_offload_size=0))
    gradients(model, context)
    gc.collect()
    assert len(sent) > 20
    assert len(context._known) <= 2  # what was called back ahead of need
    assert not context._leaving


def test_views_of_one_storage_move_once():
    context, sent = moving(OffloadActivations(min_offload_size=0))
    x = torch.randn(6, 8, requires_grad=True)
    with context:
        h = x * 1.0
        a, b, c = h.chunk(3)
        loss = (a * b).sum() + (b * c.t().reshape(2, 8)).sum() + (h * h).sum()
    loss.backward()
    assert sent.count(6 * 8 * 4) == 1
    y = x.detach().requires_grad_()
    h = y * 1.0
    a, b, c = h.chunk(3)
    ((a * b).sum() + (b * c.t().reshape(2, 8)).sum() + (h * h).sum()).backward()
    assert torch.equal(x.grad, y.grad)


def test_strides_offsets_and_expansion_survive():
    context, _ = moving(OffloadActivations(min_offload_size=0))
    base = torch.arange(24.0).reshape(4, 6)
    for view in (base.t(), base[1:, 2:], base[:, ::2], base[:1].expand(3, 6), base[2, 3]):
        back = context._unpack(context._pack(view))
        assert torch.equal(back, view)
        assert (back.stride(), back.storage_offset()) == (view.stride(), view.storage_offset())


@pytest.mark.parametrize("streams", [True, False])
def test_a_storage_that_is_written_to_is_saved_again(streams):
    context, sent = moving(OffloadActivations(use_streams=streams, min_offload_size=0, max_fwd_stash_size=1))
    x = torch.full((4,), 3.0)
    before = context._pack(x.clone().mul_(1))
    buffer = torch.full((4,), 1.0)
    first = context._pack(buffer)
    context._pack(x)  # pushes the first copy off the device
    buffer.add_(1)
    second = context._pack(buffer)
    context._pack(before.entry.host)
    assert torch.equal(context._unpack(second), torch.full((4,), 2.0))
    assert len(sent) == 5
    if not streams:
        assert torch.equal(context._unpack(first), torch.full((4,), 1.0))


def test_parameters_small_tensors_and_subclasses_stay():
    context, _ = moving(OffloadActivations(min_offload_size=64))
    linear = torch.nn.Linear(8, 8)
    assert isinstance(context._pack(linear.weight.t()), torch.Tensor)
    context.update_model_params(linear)
    assert isinstance(context._pack(linear.weight.data.view(-1)), torch.Tensor)
    assert isinstance(context._pack(torch.zeros(15)), torch.Tensor)
    assert not isinstance(context._pack(torch.zeros(16)), torch.Tensor)


def test_the_head_saves_in_place():
    model = tiny_model("llama", num_hidden_layers=1)
    context, sent = moving(get_act_offloading_ctx_manager(model, min_offload_size=0))
    body_only, sent_by_body = moving(OffloadActivations(min_offload_size=0))
    body_only.update_model_params(model)
    hidden = torch.randn(1, 8, 32, requires_grad=True)
    with context:
        model.lm_head(hidden)
    assert sent == []
    with body_only, NoOpManager():
        (hidden * hidden).sum()
    assert sent_by_body == []
    with pytest.raises(RuntimeError), context:
        model.lm_head(torch.zeros(3))  # the wrong width: the hooks must come off all the same
    with context:
        (hidden * hidden * 1.0).sum()
    assert sent != []


def test_a_model_without_a_head_is_said_once(caplog):
    with caplog.at_level(logging.WARNING):
        get_act_offloading_ctx_manager(torch.nn.Linear(2, 2))
        get_act_offloading_ctx_manager(torch.nn.Linear(2, 2), warn_if_no_head=False)
    assert caplog.text.count("no known output head") == 1


def test_a_cpu_round_trip_frees_the_graph():
    """No reference cycle: dropping the loss frees what was saved without the garbage collector."""
    gc.disable()
    try:
        x = torch.randn(8, requires_grad=True)
        with OffloadActivations():
            y = x.exp()  # exp saves its own output
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert storage.expired()
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_bits_are_the_same_and_memory_falls():
    def run(context_of):
        model = tiny_model("llama", num_hidden_layers=8, hidden_size=256, intermediate_size=1024).cuda()
        ids = torch.arange(90, device="cuda").repeat(16, 2)
        model.train()
        torch.cuda.reset_peak_memory_stats()
        with context_of(model):
            loss = model(input_ids=ids, labels=ids).loss
            held = torch.cuda.memory_allocated()
            loss.backward()
        return held, {name: parameter.grad for name, parameter in model.named_parameters()}

    held, expected = run(lambda model: NoOpManager())
    held_offloaded, actual = run(get_act_offloading_ctx_manager)
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)
    assert held_offloaded < 0.6 * held


def test_the_stash_needs_room_for_one():
    with pytest.raises(ValueError, match="max_fwd_stash_size"):
        OffloadActivations(max_fwd_stash_size=0)
