"""One contract over all kinds of teachers: the divergence and its gradient are those of the full logits, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny import tiny_model
from trl.collators.preference import completion_batch
from trl.models.packed.layout import padded_rows
from trl.models.reference import AdapterReference, FrozenModel, InitialPolicy
from trl.models.scoring.causal import Scorer
from trl.models.teacher import ColumnTeacher, FrozenTeacher, SelfTeacher
from trl.objectives.distillation import Divergence, divergence

ROWS = [([5, 9, 3], [[7, 8, 6], [9]]), ([4, 4], [[3, 2, 1, 7], [6, 9]])]
HINTED = [([2, 5, 9, 3], [[7, 8, 6], [9]]), ([8, 8, 1, 4, 4], [[3, 2, 1, 7], [6, 9]])]
WEIGHTS = torch.linspace(0.5, 2.0, 10, dtype=torch.float64)
LOSS = Divergence(beta=0.3)


def student(*, adapter: bool = False, **settings: Any) -> Any:
    model = tiny_model("llama", dtype=torch.float64, **settings)
    if not adapter:
        return model
    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    return get_peft_model(model, config).double()


def logits_of(model: Any, rows: Any, temperature: float) -> torch.Tensor:
    """The logits that predict the completions, of each sequence alone."""
    found = []
    for prompt, completions in rows:
        for completion in completions:
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
            found.append(logits[len(prompt) - 1 : -1] / temperature)
    return torch.cat(found)


def frozen(model: Any, rows: Any, temperature: float) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    teacher = tiny_model("gpt2", dtype=torch.float64)
    return FrozenTeacher(FrozenModel(teacher, Scorer(teacher))), logits_of(teacher, rows, temperature), {}


def base(model: Any, rows: Any, temperature: float) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    with model.disable_adapter():
        expected = logits_of(model, rows, temperature)
    return SelfTeacher(AdapterReference(Scorer(model))), expected, {}


def live(model: Any, rows: Any, temperature: float) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    return SelfTeacher(InitialPolicy(model, Scorer(model))), logits_of(model, rows, temperature), {}


def columns(model: Any, rows: Any, temperature: float) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    _, logits, _ = frozen(model, rows, temperature)
    best = logits.log_softmax(-1).topk(logits.shape[-1])
    return ColumnTeacher(), logits, {"teacher_ids": best.indices, "teacher_logps": best.values}


KINDS: dict[str, tuple[Any, bool]] = {
    "frozen": (frozen, False),
    "columns": (columns, False),
    "base": (base, True),
    "live": (live, False),
    "live, adapter": (live, True),
}


def gradients(model: Any, total: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    total.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.requires_grad and x.grad is not None}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    size = max(gradient.abs().max().item() for gradient in expected.values())
    assert found.keys() == expected.keys() and size > 1e-4
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max().item() <= tolerance * size, name


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.tensors.vocabulary_loss.default_chunk_size", lambda *args, **kwargs: 4)


@pytest.mark.parametrize("rows", [ROWS, HINTED], ids=["same prompts", "other prompts"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_is_that_of_the_full_logits(kind: str, rows: Any) -> None:
    make, adapter = KINDS[kind]
    model = student(adapter=adapter)
    with torch.no_grad():
        teacher, logits, answers = make(model, rows, 0.7)
    values = divergence(logits_of(model, ROWS, 0.7), logits, beta=0.3) * WEIGHTS
    wanted = gradients(model, values.sum() * 3) if values.sum() > 1e-9 else {}

    model.train()
    for layout in ("shared", "packed", "padded"):
        batch: dict[str, Any] = {**completion_batch(ROWS, prefix_sharing=layout == "shared"), **answers}
        batch["teacher_batch"] = completion_batch(rows, prefix_sharing=layout == "shared")
        if layout == "padded":
            batch = {**padded_rows(batch, pad_token_id=0), **answers, "teacher_batch": padded_rows(batch["teacher_batch"], pad_token_id=0)}  # fmt: skip
        for packed in (None, False):
            found = teacher.divergence(
                Scorer(model, packed=packed), model, batch, LOSS, temperature=0.7, weights=WEIGHTS
            )
            torch.testing.assert_close(found.values, values.detach(), rtol=1e-10, atol=1e-12)
            own = gradients(model, found.total * 3)
            if wanted:
                assert_equal(own, wanted, 1e-6)  # norms and rotations compute in float32
            else:
                assert max(x.abs().max() for x in own.values()) < 1e-12
        assert model.training
