"""bfloat16 weights with residuals train as float32 weights with a bfloat16 forward."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, get_cosine_schedule_with_warmup

from tests.models.residuals_worker import steps
from tests.tiny import tiny_model
from tests.trainer import ppo_runs
from tests.trainer.one_step import fixed_rows, trainer_of
from tests.two_processes import launch
from trl import SFTConfig, SFTTrainer
from trl.models import residuals
from trl.models.residuals import check_residuals, clip_gradients, join, keep_residuals, split
from trl.options.shared import RESIDUAL

HIGH = torch.arange(2**16, dtype=torch.int32)
TIE = 0x8000


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.empty(bits.shape, dtype=torch.bfloat16)
    split(bits.view(torch.float32), weight, residual := torch.empty_like(weight))
    return weight, residual


@pytest.mark.parametrize("low", [*range(0, 2**16, 1009), 1, TIE - 1, TIE + 1, 2**16 - 1])
def test_the_halves_of_every_number_have_its_bits(low):
    """All signs, exponents and upper mantissas: zeros, denormals, infinities, NaN."""
    bits = (HIGH << 16) | low
    number = bits.view(torch.float32)
    weight, residual = halves(bits)
    is_nan = number.isnan()
    assert torch.equal(weight[~is_nan], number.bfloat16()[~is_nan])
    assert torch.equal(join(weight, residual).view(torch.int32)[~is_nan], bits[~is_nan])
    assert weight.isnan().equal(is_nan) and join(weight, residual).isnan().equal(is_nan)


def test_a_tie_that_rounds_down_is_a_step_of_float32_off():
    """2**17 + 1 numbers round to two neighbours with even and odd last bits, whose residuals have 2**17 values."""
    bits = (HIGH << 16) | TIE
    bits = bits[~bits.view(torch.float32).isnan()]
    weight, residual = halves(bits)
    assert torch.equal(weight, bits.view(torch.float32).bfloat16())
    steps = bits - join(weight, residual).view(torch.int32)
    rounds_up = (bits >> 16) % 2 == 1
    assert torch.equal(steps, (~rounds_up).int())


# ---- optimisers


class Masters(torch.optim.AdamW):
    """The plain way: float32 weights, from which the bfloat16 ones are rounded after each step; gradients are clipped.

    A tie that rounds down is a step of float32 off, as above: which weights meet one depends on the CPU's kernels, and
    in 200 steps one may turn the rounding of a weight, and with it all gradients.
    """

    def __init__(self, weights: list[nn.Parameter], limit: float = math.inf, **settings: Any) -> None:
        self.weights, self.masters, self.limit = weights, [each.detach().float() for each in weights], limit
        super().__init__(self.masters, **settings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, self.limit)
        super().step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            bits = master.view(torch.int32)
            bits -= ((bits & 0x1FFFF) == TIE).int()
            weight.data.copy_(master)
            weight.grad = None


def network() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64))
        return model.bfloat16(), torch.randn(32, 128).bfloat16(), torch.randn(32, 64)


def trained(make: Callable[[list[nn.Parameter]], Any], steps: int) -> tuple[list[nn.Parameter], Any]:
    model, inputs, targets = network()
    weights = list(model.parameters())
    optimizer = make(weights)
    for _ in range(steps):
        (model(inputs).float() - targets).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    return weights, optimizer


def keeping(make: Callable[..., Any]) -> Callable[[list[nn.Parameter]], Any]:
    def made(weights: list[nn.Parameter]) -> Any:
        optimizer = make(weights)
        keep_residuals(optimizer)
        return optimizer

    return made


def masters_of(weights: list[nn.Parameter], optimizer: Any) -> list[Tensor]:
    return [join(weight.detach(), optimizer.state[weight]["residual"]) for weight in weights]


DECAY = {"weight_decay": 0.01}


@pytest.mark.parametrize("learning_rate", [1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("kind", ["fused", "foreach", "loop"])
def test_200_steps_equal_those_of_float32_weights(learning_rate, kind, monkeypatch):
    """To 1e-6, of weights of about 0.1; also a few parameters at a time."""
    monkeypatch.setattr(residuals, "_CHUNK", 128 * 128 + 200)

    settings = {**DECAY, "lr": learning_rate, "fused": kind == "fused", "foreach": kind == "foreach"}
    weights, optimizer = trained(keeping(lambda weights: torch.optim.AdamW(weights, **settings)), 200)
    expected, masters = trained(lambda weights: Masters(weights, **settings), 200)
    for weight, master in zip(masters_of(weights, optimizer), masters.masters, strict=True):
        torch.testing.assert_close(weight, master, rtol=0, atol=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    state = optimizer.state[weights[0]]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


def moved(weights: list[nn.Parameter], optimizer: Any) -> float:
    """The share of float32 weights that differ from the first."""
    pairs = zip(masters_of(weights, optimizer), network()[0].parameters(), strict=True)
    changed = [(master != first.float()).flatten() for master, first in pairs]
    return torch.cat(changed).float().mean().item()


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "adafactor", "adamw_torch"])
def test_every_weight_moves_at_a_small_learning_rate(name):
    """In four steps at 1e-6, with the optimisers of transformers: bitsandbytes' of one byte per moment among them."""
    args = SFTConfig("unused", optim=name, learning_rate=1e-6, use_cpu=True)
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    weights, optimizer = trained(keeping(lambda weights: kind(weights, **settings)), 4)
    assert moved(weights, optimizer) > 0.99
    plain, _ = trained(lambda weights: kind(weights, **settings), 4)
    before = torch.cat([weight.flatten() for weight in network()[0].parameters()])
    assert (torch.cat([weight.flatten() for weight in plain]) != before).float().mean() < 0.05
    if name.endswith("8bit"):
        state = optimizer.state[weights[0]]
        whole = [each.nbytes for each in state.values() if isinstance(each, Tensor) and each.shape == weights[0].shape]
        assert sum(whole) == (1 + 1 + 2) * weights[0].numel()


def test_overrides_of_bitsandbytes_apply():
    """transformers gives embeddings moments of 32 bits, which bitsandbytes looks up by the parameter."""
    import bitsandbytes

    model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 128, bias=False)).bfloat16()
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-6)
    keep_residuals(optimizer)
    model(torch.arange(64)).float().square().sum().backward()
    optimizer.step()
    manager.initialize()
    assert [optimizer.state[each]["state1"].dtype for each in model.parameters()] == [
        torch.float32,
        torch.uint8,
    ]


def test_a_loaded_state_has_the_bits_of_the_saved_one(tmp_path):
    """Also through a file, and under a scheduler that was made before: PyTorch casts moments to the dtype of weights."""

    def make(weights: Any) -> Any:
        optimizer = torch.optim.AdamW(weights, lr=1e-3)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return optimizer

    _, optimizer = trained(keeping(make), 3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other = keeping(make)(list(network()[0].parameters()))
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    saved, loaded = (each.state_dict()["state"] for each in (optimizer, other))
    for number, state in saved.items():
        assert state.keys() == loaded[number].keys() == {"step", "exp_avg", "exp_avg_sq", "residual"}
        for name, value in state.items():
            assert loaded[number][name].dtype == value.dtype
            one, other = (each.reshape(-1).view(torch.uint8) for each in (loaded[number][name], value))
            assert torch.equal(one, other)


def test_parameters_of_other_dtypes_step_as_before_and_gradients_are_clipped():
    """Clipped in float32, with the norm of all: here a tenth of it. Parameters without a gradient stay."""
    weights = [nn.Parameter(torch.full((3,), 2.0, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    weights.append(nn.Parameter(torch.ones(1, dtype=torch.bfloat16)))
    optimizer = torch.optim.SGD(weights, lr=1.0)
    keep_residuals(optimizer)
    gradients = [torch.tensor([1.0, 2.0, 2.0]), torch.tensor([0.0, 4.0, 0.0])]
    for weight, gradient in zip(weights, gradients, strict=False):
        weight.grad = gradient.to(weight.dtype, copy=True)
    assert clip_gradients(optimizer, weights, 0.5) == 5.0
    optimizer.step()
    factor = 0.5 / (5.0 + 1e-6)
    torch.testing.assert_close(masters_of(weights[:1], optimizer)[0], 2 - factor * gradients[0], rtol=0, atol=2e-7)
    torch.testing.assert_close(weights[1].detach(), 2 - factor * gradients[1], rtol=0, atol=2e-7)
    assert weights[2].item() == 1.0
    assert weights[2] not in optimizer.state
    assert optimizer.gradient_scale == 1  # of the next step


def test_an_optimiser_with_state_of_groups_is_refused():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1

    with pytest.raises(TypeError, match="cannot be used with Counting, which has state of whole groups"):
        trained(keeping(lambda weights: Counting(weights, lr=1.0)), 1)


# ---- trainers


def sft(out: Any, **settings: Any) -> SFTTrainer:
    settings = {
        "max_steps": 4,
        "optim": "adamw_torch",
        "learning_rate": 1e-5,
        "max_grad_norm": 1.0,
        **settings,
    }
    settings.setdefault("model", tiny_model("llama", dtype=torch.bfloat16))
    rows = Dataset.from_list(fixed_rows())
    trainer = trainer_of(SFTTrainer, SFTConfig, str(out), settings, train_dataset=rows)
    trainer.remove_callback(trainer.keep)
    return trainer


def test_100_steps_of_a_trainer_equal_those_of_float32_weights(tmp_path):
    """Losses and float32 weights, with clipping and a schedule, to 1e-6."""
    trainer = sft(tmp_path / "ours", weights=RESIDUAL, max_steps=100, lr_scheduler_type="cosine", warmup_steps=20)
    trainer.train()
    model = tiny_model("llama", dtype=torch.bfloat16)
    optimizer = Masters(list(model.parameters()), limit=1.0, lr=1e-5, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 20, 100)
    plain = sft(tmp_path / "plain", model=model, optimizers=(optimizer, schedule), max_steps=100, max_grad_norm=0.0)
    plain.train()
    losses = [[log["loss"] for log in each.state.log_history if "loss" in log] for each in (trainer, plain)]
    assert len(losses[0]) == 100
    assert losses[0][-1] < losses[0][0] - 0.2
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for weight, master in zip(trainer.model.parameters(), optimizer.masters, strict=True):
        assert weight.dtype == torch.bfloat16
        whole = join(weight.detach(), trainer.optimizer.state[weight]["residual"])
        torch.testing.assert_close(whole, master, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_by_name_trains_and_is_saved_in_bfloat16(dtype, tmp_path):
    """A float32 file is rounded first; the optimiser, a user's own here, holds the rest of each weight."""
    tiny_model("llama", dtype=dtype).save_pretrained(tmp_path / "model")
    trainer = sft(tmp_path, model=str(tmp_path / "model"), weights=RESIDUAL)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    assert {weight.dtype for weight in before} == {torch.bfloat16}
    trainer.train()
    state = trainer.optimizer.state
    assert all(state[weight]["exp_avg"].dtype == torch.float32 for weight in trainer.model.parameters())
    trainer.save_model(str(tmp_path / "end"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    for weight, one in zip(trainer.model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(weight, one)


def test_adapters_train_with_residuals_and_their_base_stays(tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    trainer = sft(tmp_path, model=model, weights=RESIDUAL, peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    trainer.train()
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in trained} == {torch.bfloat16}
    assert all("residual" in trainer.optimizer.state[weight] for weight in trained)
    frozen = {weight.dtype for weight in trainer.model.parameters() if not weight.requires_grad}
    assert frozen == {torch.float32}


def test_a_step_level_loop_keeps_residuals():
    trainer = ppo_runs.make_trainer(ppo_runs.value_model(dtype=torch.bfloat16), weights=RESIDUAL, max_grad_norm=1.0)
    trainer.step(*ppo_runs.batch())
    core = trainer.model.pretrained_model
    trained = [weight for weight in core.parameters() if weight in trainer.optimizer.state]
    assert len(trained) > 10
    assert all(weight.dtype == torch.bfloat16 and "residual" in trainer.optimizer.state[weight] for weight in trained)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optim": "lomo"}, "optim='lomo' has no step of its own"),
        ({"optim": "galore_adamw_layerwise"}, "has no step of its own"),
        ({"optim": "schedule_free_adamw"}, "has no step of its own"),
        ({"model": "name", "model_init_kwargs": {"dtype": "float32"}}, "needs dtype='bfloat16', got float32"),
    ],
)
def test_what_cannot_be_combined_is_refused(settings, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        sft(tmp_path, weights=RESIDUAL, **settings)


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        ({"deepspeed_plugin": object()}, "DeepSpeed keeps float32 weights of its own"),
        ({"precision": "fp16"}, "float16 scales its gradients"),
        ({"fsdp_plugin": SimpleNamespace(fsdp_version=1)}, "FSDP must be version 2"),
        ({"fsdp_plugin": SimpleNamespace(fsdp_version=2), "precision": "bf16"}, "Set bf16=False"),
    ],
)
def test_sharding_with_weights_of_its_own_is_refused(plugins, words):
    state = SimpleNamespace(**{"deepspeed_plugin": None, "fsdp_plugin": None, **plugins})
    accelerator = SimpleNamespace(state=state, mixed_precision=plugins.get("precision", "no"))
    with pytest.raises(ValueError, match=words):
        check_residuals(accelerator)


# ---- two processes


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_sharded_weights_equal_those_of_one_process_and_are_resumed(kind, tmp_path):
    """FSDP2 over gloo: resumed to the bit; those of one process but for the rounding of bfloat16 gradients."""
    launch("tests.models.residuals_worker", str(tmp_path), kind)
    expected, resumed = torch.load(tmp_path / "weights.pt")
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], weight) for name, weight in resumed.items())
    _, single = steps(str(tmp_path / "single"), per_device_train_batch_size=4)
    for name, weight in single.items():
        assert (weight - expected[name]).abs().mean() < 4e-5, name  # 1% of four steps of 1e-3
