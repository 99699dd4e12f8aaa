"""bfloat16 weights with residuals train as float32 weights with a bfloat16 forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.residuals_worker import steps
from tests.two_processes import launch
from trl.models import residuals
from trl.models.residuals import join, keep_residuals, split

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


class Masters:
    """The plain way: float32 weights with an optimiser of theirs, from which the bfloat16 weights are rounded."""

    def __init__(self, weights: list[nn.Parameter], make: Callable[..., torch.optim.Optimizer]) -> None:
        self.weights, self.masters = weights, [weight.detach().float() for weight in weights]
        self.optimizer = make(self.masters)

    def step(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.data.copy_(master)


def network() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64)
        )
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


def adamw(weights: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, **{"lr": 1e-5, "weight_decay": 0.01, **settings})


@pytest.mark.parametrize("learning_rate", [1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("kind", ["fused", "foreach", "loop"])
def test_200_steps_equal_those_of_float32_weights(learning_rate, kind, monkeypatch):
    """To 1e-6, of weights of about 0.1; also a few parameters at a time."""
    monkeypatch.setattr(residuals, "_CHUNK", 128 * 128 + 200)

    def make(weights: Any) -> torch.optim.Optimizer:
        return adamw(weights, lr=learning_rate, fused=kind == "fused", foreach=kind == "foreach")

    weights, optimizer = trained(keeping(make), 200)
    expected, masters = trained(lambda weights: Masters(weights, make), 200)
    for weight, master in zip(masters_of(weights, optimizer), masters.masters, strict=True):
        torch.testing.assert_close(weight, master, rtol=0, atol=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    state = optimizer.state[weights[0]]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


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
