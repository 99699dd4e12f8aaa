"""One contract over all kinds of teachers: the divergence and its gradient are those of the full logits, in float64."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.tiny import tiny_classifier, tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl.collators.preference import completion_batch
from trl.models.packed.layout import padded_rows
from trl.models.reference import AdapterReference, FrozenModel, InitialPolicy
from trl.models.scoring import causal
from trl.models.scoring.causal import Scorer
from trl.models.teacher import (
    ColumnTeacher,
    FrozenTeacher,
    SelfTeacher,
    TeacherByRow,
    make_teacher,
    own_teacher,
)
from trl.objectives.distillation import Divergence, divergence
from trl.trainer.callbacks.sync_ref_model import SyncRefModelCallback

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # lm_head is linear, c_attn transposed
ROWS = [([5, 9, 3], [[7, 8, 6], [9]]), ([4, 4], [[3, 2, 1, 7], [6, 9]])]
HINTED = [([2, 5, 9, 3], [[7, 8, 6], [9]]), ([8, 8, 1, 4, 4], [[3, 2, 1, 7], [6, 9]])]
WEIGHTS = torch.linspace(0.5, 2.0, 10, dtype=torch.float64)
SEQUENCES = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3])
LOSS = Divergence(beta=0.3)


def student(*, adapter: bool = False, **settings: Any) -> Any:
    model = tiny_model("gpt2", dtype=torch.float64, tie_word_embeddings=False, **settings)
    if not adapter:
        return model
    config = LoraConfig(r=2, target_modules=["lm_head", "c_attn"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
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
    teacher = tiny_model("llama", dtype=torch.float64)
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


def ema(model: Any, rows: Any, temperature: float) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    teacher = own_teacher("ema", model, Scorer(model))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.25)
    SyncRefModelCallback.sync_target_model(model, teacher.model, 0.4)
    return teacher, logits_of(teacher.model, rows, temperature), {}


def several(model: Any, rows: Any, temperature: float) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """The model, columns and the live student, for the second, first and third, and no completion of four."""
    first, second = frozen(model, rows, temperature), columns(model, rows, temperature)
    third = live(model, rows, temperature)
    names = {"columns": second[0], "model": first[0], "nobody's": first[0], "live": third[0]}
    chosen = torch.tensor([1, 0, 3, 1])
    logits = torch.where(chosen[SEQUENCES][:, None] == 3, third[1], first[1])
    return TeacherByRow(names), logits, {**second[2], "teacher": chosen}


KINDS: dict[str, tuple[Any, bool]] = {
    "frozen": (frozen, False),
    "columns": (columns, False),
    "base": (base, True),
    "live": (live, False),
    "live, adapter": (live, True),
    "ema": (ema, False),
    "ema, adapter": (ema, True),
    "several": (several, False),
    "several, adapter": (several, True),
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
                assert_equal(own, wanted, 1e-10)
            else:
                assert max(x.abs().max() for x in own.values()) < 1e-12
        assert model.training


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_64_tokens_and_a_tail_are_close_to_the_whole_distribution(beta: float) -> None:
    """They hold 99 % of the probability; merging tokens into one class takes from a divergence."""
    generator, rank = torch.Generator().manual_seed(0), torch.arange(1, 4001, dtype=torch.float64)
    noise = torch.randn(2, 50, 4000, generator=generator, dtype=torch.float64)
    logits, teacher = -2.0 * rank.log() + 0.7 * noise
    best, loss = teacher.log_softmax(-1).topk(64), Divergence(beta)
    less = loss.of_logits(logits, teacher) - loss.of_top_k(logits, best.indices, best.values)
    assert less.min() >= 0 and 0 < less.mean() < 1e-2


def test_an_adapter_of_a_sharded_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = student(adapter=True)
    monkeypatch.setattr(causal, "is_sharded", lambda head: True)
    teacher = SelfTeacher(AdapterReference(Scorer(model)))
    with pytest.raises(ValueError, match="target_modules"):
        teacher.divergence(Scorer(model), model, completion_batch(ROWS, prefix_sharing=True), LOSS)


def saved(folder: Any, tokenizer: Any) -> str:
    tokenizer.save_pretrained(folder)
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    return str(folder)


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Any) -> None:
    tokenizer, other = tiny_tokenizer(), tiny_tokenizer()
    path = saved(tmp_path / "same", other)
    model = tiny_model("gpt2", vocab_size=len(tokenizer))
    assert make_teacher(path, None, model, tokenizer).model is not None
    vocabulary = json.loads(other.backend_tokenizer.to_str())
    tokens = vocabulary["model"]["vocab"]
    tokens["A"], tokens["B"] = tokens["B"], tokens["A"]
    exchanged = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(vocabulary)))
    path = saved(tmp_path / "other", exchanged)
    for teacher in (path, AutoModelForCausalLM.from_pretrained(path)):
        with pytest.raises(ValueError, match=r"'A' and 'B'.*GOLDTrainer"):
            make_teacher(teacher, None, model, tokenizer)
    for teacher, error in ((None, ValueError), (3, TypeError), (tiny_classifier("gpt2"), TypeError)):
        with pytest.raises(error, match=r"^teacher_model must be"):
            make_teacher(teacher, None, model, tokenizer)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_a_teacher_may_be_saved_without_a_tokenizer(name: str, tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer()
    tiny_model(name, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    model = tiny_model("gpt2", vocab_size=len(tokenizer))
    assert make_teacher(str(tmp_path), None, model, tokenizer).model is not None


def test_a_teacher_that_the_device_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, state = frozen(student(), ROWS, 1.0)[0], SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    accelerator: Any = SimpleNamespace(device=torch.device("cuda"), state=state)
    with pytest.raises(ValueError, match=r"trl teach.*teacher_model_server_url"):
        teacher.prepare(accelerator)


def test_a_teacher_that_is_on_the_device_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, state = frozen(student(), ROWS, 1.0)[0], SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    accelerator: Any = SimpleNamespace(device=torch.device("cuda"), state=state)
    prepared: list[Any] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(teacher.reference, "prepare", prepared.append)
    on_device = SimpleNamespace(nbytes=5000, device=torch.device("cuda", 0))
    monkeypatch.setattr(teacher.reference.module, "parameters", lambda: iter([on_device]))
    teacher.prepare(accelerator)
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    teacher.reference.module.hf_device_map = {"": "cpu"}  # accelerate moves its layers
    teacher.prepare(accelerator)
    assert prepared == [accelerator]


def test_an_ema_of_an_adapter_shares_the_base_and_saves_the_adapter_alone(tmp_path: Any) -> None:
    model = student(adapter=True)
    teacher: Any = own_teacher("ema", model, Scorer(model))
    weights, copies = dict(model.named_parameters()), dict(teacher.model.named_parameters())
    assert all((copies[name] is x) != x.requires_grad for name, x in weights.items())
    with torch.no_grad():
        for x in weights.values():
            x.add_(x.requires_grad)
    expected = {name: 0.75 * copies[name] + 0.25 * x if x.requires_grad else x.clone() for name, x in weights.items()}
    SyncRefModelCallback.sync_target_model(model, teacher.model, 0.25)
    torch.testing.assert_close(copies, expected, rtol=1e-12, atol=0.0)
    teacher.reference.save(tmp_path)
    assert load_file(tmp_path / "reference.safetensors").keys() == {n for n, x in weights.items() if x.requires_grad}
    again: Any = own_teacher("ema", model, Scorer(model))
    again.reference.load(tmp_path)
    assert all(torch.equal(x, copies[name]) for name, x in again.model.named_parameters())
