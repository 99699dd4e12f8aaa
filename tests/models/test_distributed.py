"""Unwrapping for generation and hooks, as far as one process shows them."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from tests.tiny import tiny_model
from trl.models import unwrap_model_for_generation
from trl.models.distributed import (
    add_hooks,
    get_all_parameters,
    iter_params,
    prepare_deepspeed,
    prepare_fsdp,
    remove_hooks,
)


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def test_generation_settings_and_checkpointing_are_put_back(accelerator):
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    config = model.generation_config
    options = {"temperature": 0.25, "max_new_tokens": 3}
    with (
        pytest.raises(RuntimeError, match="inside"),
        unwrap_model_for_generation(model, accelerator, generation_kwargs=options) as unwrapped,
    ):
        assert unwrapped is model
        assert not model.is_gradient_checkpointing
        assert (model.generation_config.temperature, model.generation_config.max_new_tokens) == (0.25, 3)
        raise RuntimeError("inside")
    assert model.generation_config is config
    assert config.temperature != 0.25
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize(("prepare", "kind"), [(prepare_deepspeed, "DeepSpeed"), (prepare_fsdp, "FSDP")])
def test_wrapping_needs_the_matching_run(accelerator, prepare, kind):
    with pytest.raises(ValueError, match=kind):
        prepare(torch.nn.Linear(1, 1), accelerator)


def test_parameters_include_those_registered_from_outside():
    module = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
    outside = torch.nn.Parameter(torch.zeros(1))
    assert iter_params(module) == []
    assert len(iter_params(module, recurse=True)) == 1
    module.ds_external_parameters = lambda: [("outside", outside)]
    assert [name for name, _ in get_all_parameters(module, recurse=True)] == ["0.weight", "outside"]


def test_hooks_come_off_and_go_back():
    module, calls = torch.nn.Linear(1, 1), []
    for parameter in module.parameters():
        parameter.ds_active_sub_modules = {1}

    def register(target):
        offload.forward_hooks.append(target.register_forward_hook(lambda *_: calls.append("forward")))

    offload = SimpleNamespace(module=module, forward_hooks=[], backward_hooks=[], _register_deepspeed_module=register)
    register(module)
    engine = SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=offload))
    remove_hooks(engine)
    module(torch.zeros(1))
    assert (calls, offload.forward_hooks, module.weight.ds_active_sub_modules) == ([], [], set())
    add_hooks(engine)
    module(torch.zeros(1))
    assert calls == ["forward"]
    remove_hooks(SimpleNamespace(optimizer=None))
    add_hooks(SimpleNamespace(optimizer=None))
