"""What differs on a GPU: variable-length attention, half precision, large chunks, streams. Skipped without one."""

import pytest
import torch

from tests.tensors.test_segments import visible_in
from tests.tiny import tiny_model
from tests.trainer.one_step import run
from trl.generation.engine import Sampling
from trl.generation.transformers.choosing import choose
from trl.models.packed import attention
from trl.models.packed.support import use_packed_attention
from trl.models.scoring.causal import Scorer
from trl.models.scoring.head import ScoreOptions
from trl.reporting.metrics import MetricSums
from trl.tensors.logprobs import local_loss, token_scores
from trl.tensors.reduce import Weighted
from trl.tensors.segments import Segments
from trl.tensors.softmax_rows import Statistics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = {
    "plain": Segments.from_lengths([5, 130, 64, 1]),
    "tree": Segments.from_prefix_groups([(70, [30, 2, 65]), (1, [3]), (40, [])]),
}


def reference(query, key, value, segments, scale, window=None):
    """Attention written out in float64 over the definition's matrix: `(1, heads, N, D)`."""
    visible = visible_in(segments).to(query.device)
    if window is not None:
        positions = segments.position_ids()[0].to(query.device)
        visible &= positions[:, None] - positions[None] < window
    query, key, value = (part.double() for part in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_segment_attention_and_its_gradients(dtype, shape, window, monkeypatch):
    segments = SHAPES[shape]
    calls = []
    inner = attention._variable_length
    monkeypatch.setattr(attention, "_variable_length", lambda *a: calls.append(1) or inner(*a))
    tensors = [
        torch.randn(1, heads, segments.total, 32, device="cuda", dtype=dtype).requires_grad_() for heads in (4, 2, 2)
    ]
    copies = [tensor.detach().double().requires_grad_() for tensor in tensors]
    output, _ = attention.packed_attention(
        torch.nn.Module(), *tensors, segments.table, scaling=0.2, sliding_window=window
    )
    expected = reference(*copies, segments, 0.2, window)
    slope = torch.randn_like(expected)
    output.backward(slope.to(dtype))
    expected.backward(slope.to(dtype).double())
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    assert bool(calls) == (dtype != torch.float32)
    for one, other in zip([output, *(t.grad for t in tensors)], [expected, *(c.grad for c in copies)], strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_flat_and_padded_rows_agree_in_bfloat16(architecture):
    model = tiny_model(architecture).cuda().eval()
    lengths = [40, 3, 17]
    mask = torch.stack([(torch.arange(40) < n).long() for n in lengths]).cuda()
    ids = torch.randint(3, 60, (3, 40), device="cuda") * mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}
    exact = Scorer(model, packed=False).score(model, batch).logps
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half = Scorer(model).score(model, batch).logps
    single = Scorer(model).score(model, batch).logps
    torch.testing.assert_close(single, exact, rtol=1e-4, atol=1e-4)
    assert (half - exact).norm() <= 3e-2 * exact.norm()


def test_scores_of_a_large_vocabulary_against_float64():
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(3000, 256, device="cuda", generator=generator, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(50_000, 256, device="cuda", generator=generator) * 0.05).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(50_000, (3000,), device="cuda", generator=generator)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = (exact[0] @ exact[1].T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (-expected.mean()).backward()
    loss = local_loss(
        hidden, weight, targets, lambda logps, _: -logps / 3000, wanted=Statistics(entropy=True, correct=True)
    )
    loss.total.backward()
    torch.testing.assert_close(loss.scores.logps.double(), expected, rtol=2e-2, atol=2e-2)
    assert (hidden.grad.double() - exact[0].grad).norm() <= 1e-2 * exact[0].grad.norm()
    assert (weight.grad.double() - exact[1].grad).norm() <= 1e-2 * exact[1].grad.norm()
    again = token_scores(hidden, weight, targets)
    torch.testing.assert_close(again.logps, loss.scores.logps)


def test_memory_of_scoring_is_a_fraction_of_the_logits():
    hidden = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(152_000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(152_000, (8192,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    local_loss(hidden, weight, targets, lambda logps, _: -logps).total.backward()
    growth = torch.cuda.max_memory_allocated() - before
    assert growth < 0.5 * 8192 * 152_000 * 4


def test_the_trainer_takes_bfloat16_by_default_and_agrees_with_float32():
    losses = {}
    for name, settings in {"default": {}, "float32": {"bf16": False}, "cpu": {"use_cpu": True}}.items():
        trainer, _ = run(tiny_model("llama"), **{"use_cpu": False, "max_steps": 3, "learning_rate": 0.02, **settings})
        losses[name] = trainer.state.log_history[-2]["loss"]
        assert trainer.args.bf16 == (name == "default")
    assert losses["float32"] == pytest.approx(losses["cpu"], rel=1e-3)
    assert losses["default"] == pytest.approx(losses["cpu"], rel=5e-2)


@pytest.mark.parametrize("settings", [{"activation_offloading": True}, {"gradient_checkpointing": True}])
def test_memory_savers_change_no_gradient(settings):
    both = [run(tiny_model("llama"), use_cpu=False, bf16=False, **more)[1].steps[0] for more in ({}, settings)]
    for name, gradient in both[0].items():
        torch.testing.assert_close(both[1][name], gradient, rtol=1e-5, atol=1e-6)


def test_every_token_entropy_on_the_device():
    model = tiny_model("llama").cuda().eval()
    use_packed_attention(model)
    ids = torch.randint(3, 60, (1, 9), device="cuda")
    batch = {"input_ids": ids, "position_ids": torch.arange(9, device="cuda")[None], "labels": ids}
    scored = Scorer(model).score(model, batch, ScoreOptions(entropy="all"))
    logits = model(input_ids=ids).logits
    expected = torch.distributions.Categorical(logits=logits).entropy().sum()
    torch.testing.assert_close(scored.entropy.total, expected, rtol=1e-4, atol=1e-4)


def test_sums_of_metrics_take_parts_from_any_device():
    sums = MetricSums()
    sums.add({"aux_loss": Weighted(torch.tensor(2.0, device="cuda"), torch.ones(()))})
    sums.add({"aux_loss": Weighted(torch.tensor(4.0), torch.ones(()))})
    sums.add({"other": Weighted(torch.tensor(1.0), torch.tensor(2, device="cuda"))})
    assert sums.drain() == {"aux_loss": 3.0, "other": 0.5}


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_tokens_are_drawn_with_full_determinism_too(top_p, monkeypatch):
    """torch has no deterministic running sums of floats there."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    logits = 3 * torch.randn(64, 50_000, device="cuda")
    numbers = torch.rand(64, device="cuda", dtype=torch.float64)
    sampling = Sampling(max_new_tokens=1, top_p=top_p)
    plain = choose(logits.clone(), numbers, sampling)
    torch.use_deterministic_algorithms(True)
    try:
        found = choose(logits.clone(), numbers, sampling)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found.ids, plain.ids)
    torch.testing.assert_close(found.logps, plain.logps, rtol=0, atol=1e-6)
