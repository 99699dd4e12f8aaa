import math

import pytest
import torch

from trl.tensors.statistics import (
    cap_exp,
    entropy_from_logits,
    get_exp_cap,
    logprobs_from_logits,
    masked_mean,
    masked_var,
    masked_whiten,
    nanmax,
    nanmin,
    nanstd,
    selective_log_softmax,
)

NAN = math.nan


def test_nan_statistics_by_hand():
    tensor = torch.tensor([[NAN, 4.0], [1.0, 1.0]])
    assert (nanmin(tensor).item(), nanmax(tensor).item()) == (1.0, 4.0)
    assert nanstd(tensor).item() == pytest.approx(math.sqrt(3.0))
    nothing = torch.tensor([NAN])
    assert all(math.isnan(f(nothing).item()) for f in (nanmin, nanmax, nanstd))
    assert math.isnan(nanstd(torch.tensor([2.0])).item())
    assert nanmax(torch.tensor([-math.inf, NAN])).item() == -math.inf


def test_masked_statistics_ignore_what_is_masked_even_nan():
    values, mask = torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(values, mask).item() == 3.0
    assert masked_mean(values, mask, axis=1).tolist() == [2.0, 5.0]
    assert masked_var(values, mask).item() == pytest.approx(4.0)
    assert masked_var(values, mask, unbiased=False).item() == pytest.approx(8 / 3)
    whitened = masked_whiten(values, mask)
    assert whitened[mask.bool()].tolist() == pytest.approx([-1.0, 0.0, 1.0])
    assert masked_whiten(values, mask, shift_mean=False)[mask.bool()].tolist() == pytest.approx([2.0, 3.0, 4.0])
    with pytest.raises(ValueError, match="at least 2 entries for a variance, got 1"):
        masked_var(torch.ones(3), torch.tensor([0, 1, 0]))


@pytest.mark.parametrize("shape", [(3, 200), (600,), ()])
def test_log_softmax_and_entropy_with_gradients(shape):
    logits = torch.randn(*shape, 11, dtype=torch.float64, requires_grad=True)
    index, several = torch.randint(11, shape), torch.randint(11, (*shape, 3))
    logps = logits.log_softmax(-1)
    pairs = [
        (selective_log_softmax(logits, index), logps.gather(-1, index.unsqueeze(-1)).squeeze(-1)),
        (selective_log_softmax(logits, several), logps.gather(-1, several)),
        (entropy_from_logits(logits, chunk_size=7), -(logps.exp() * logps).sum(-1)),
        (logprobs_from_logits(logits, index), logps.gather(-1, index.unsqueeze(-1)).squeeze(-1)),
        (logprobs_from_logits(logits, index, gather=False), logps),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        grads = [torch.autograd.grad(x.sum() + (x * x).sum(), logits, retain_graph=True)[0] for x in (ours, theirs)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_half_precision_and_impossible_entries():
    logits = torch.randn(5, 7).bfloat16()
    index = torch.randint(7, (5,))
    ours = selective_log_softmax(logits, index)
    assert ours.dtype == torch.bfloat16
    exact = logits.double().log_softmax(-1).gather(-1, index[:, None]).squeeze(-1)
    assert (ours.double() - exact).abs().max() < 0.02
    assert entropy_from_logits(torch.tensor([[0.0, -math.inf]])).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_capped_exp_never_overflows(dtype):
    value = torch.tensor([0.0, 1e4], dtype=dtype)
    assert torch.isfinite(cap_exp(value)).all()
    assert cap_exp(value)[0].item() == 1.0
    assert cap_exp(value, cap=0.0)[1].item() == 1.0
    assert get_exp_cap(value).shape == (1,)
