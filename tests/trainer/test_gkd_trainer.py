"""GKD: the divergence of the trained tokens, whose completions are generated, and what is refused."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import GenerationConfig

from tests.contracts.methods import gkd
from tests.tiny import tiny_classifier, tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.one_step import fixed_rows, trainer_of
from trl import GKDConfig, GKDTrainer
from trl.objectives.distillation import divergence

CHATS = [
    {
        "messages": [
            {"role": "user", "content": "What colour is the sky?"},
            {"role": "assistant", "content": text},
        ]
    }
    for text in ("Blue.", "It is blue. Look up.", "Next.", "Seven apples and 12 pears.")
]


def rows_with_prompts() -> list[dict[str, Any]]:
    return [{**row, "completion_mask": [0, *row["completion_mask"][1:]]} for row in fixed_rows()]


def double(name: str) -> Any:
    return tiny_model(name, dtype=torch.float64)


def row_values(student: Any, teacher: Any, row: dict[str, Any], *, beta: float, temperature: float) -> Tensor:
    """The divergences of a row's trained tokens, from both models' own logits."""
    ids = torch.tensor([row["input_ids"]])
    with torch.no_grad():
        logits = [model(input_ids=ids).logits[0, :-1] / temperature for model in (student, teacher)]
    trained = torch.tensor(row["completion_mask"][1:]) != 0
    return divergence(logits[0][trained], logits[1][trained], beta=beta)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_is_the_mean_divergence_of_the_trained_tokens(beta: float) -> None:
    student, teacher = double("gpt2"), double("llama")
    values = [row_values(student, teacher, row, beta=beta, temperature=0.7) for row in fixed_rows()]
    trainer = gkd(beta=beta, temperature=0.7, model=student)
    trainer.train()
    expected = torch.cat(values).mean().item()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-6)  # logged in float32
    assert all(parameter.grad is None for parameter in trainer.teacher.model.parameters())


def test_a_student_like_its_teacher_learns_nothing() -> None:
    student = double("llama")
    trainer = gkd(model=student, beta=0.5)
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss"]) < 1e-15
    assert max(gradient.abs().max() for gradient in trainer.keep.steps[0].values()) < 1e-12


def test_an_evaluation_is_the_divergence_and_generates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = gkd(lmbda=1.0, per_device_eval_batch_size=3)
    monkeypatch.setattr(trainer._generated.student.engine, "generate", None)
    found = trainer.evaluate(Dataset.from_list(fixed_rows()))
    student, teacher = trainer.model, trainer.teacher.model
    values = [row_values(student, teacher, row, beta=0.5, temperature=0.9) for row in fixed_rows()]
    assert found["eval_loss"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-12)


def on_policy(**settings: Any) -> Any:
    return gkd(**{"lmbda": 1.0, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **settings})


def step_batches(trainer: Any) -> list[Any]:
    loader = iter(trainer.get_train_dataloader())
    return trainer.get_batch_samples(loader, trainer.args.gradient_accumulation_steps, torch.device("cpu"))[0]


def test_completions_of_the_student_follow_the_prompts_of_the_rows() -> None:
    data, own = (step_batches(on_policy(lmbda=share)) for share in (0.0, 1.0))
    trainer = on_policy()
    for given, generated in zip(data, own, strict=True):
        rows = [trainer.scorer.padded_inputs(batch) for batch in (given, generated)]
        for index in range(4):
            starts = []
            for row in rows:
                real = row["attention_mask"][index] != 0
                ids, labels = row["input_ids"][index][real], row["labels"][index][real]
                start = max(int((labels != -100).int().argmax()), 1)
                assert torch.equal(labels[start:], ids[start:])  # every token of a completion is trained
                starts.append(ids[:start].tolist())
            assert starts[0] == starts[1]
            assert 1 <= int((rows[1]["labels"][index] != -100).sum()) <= 6


def test_a_share_of_the_micro_batches_is_generated_alike_in_all_processes() -> None:
    generated = on_policy(lmbda=0.3, seq_kd=True)._generated
    drawn = [generated.writers(step, 4) for step in range(200)]
    share = sum(each is generated.student for writers in drawn for each in writers) / 800
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 800)
    assert {id(each) for writers in drawn for each in writers} == {
        id(generated.student),
        id(generated.teacher),
    }
    again = on_policy(lmbda=0.3, seq_kd=True)._generated
    assert [[x is generated.student for x in row] for row in drawn] == [
        [x is again.student for x in again.writers(step, 4)] for step in range(200)
    ]


def test_with_seq_kd_the_teacher_writes_what_the_student_does_not() -> None:
    teacher_rows = step_batches(on_policy(lmbda=0.0, seq_kd=True, temperature=1e-3, max_new_tokens=3))
    teacher = double("llama")
    for batch in teacher_rows:
        rows = on_policy().scorer.padded_inputs(batch)
        for ids, labels, mask in zip(rows["input_ids"], rows["labels"], rows["attention_mask"], strict=True):
            real, completion = ids[mask != 0], ids[labels != -100]
            prompt = real[: len(real) - len(completion)]
            with torch.no_grad():
                likeliest = teacher(input_ids=real[None]).logits[0, len(prompt) - 1 : -1].argmax(-1)
            assert torch.equal(completion, likeliest)


def test_the_last_message_is_the_completion() -> None:
    tokenizer = tiny_tokenizer("chatml")
    model = tiny_model("gpt2", vocab_size=len(tokenizer))
    trainer = trainer_of(
        GKDTrainer, GKDConfig, None, {"lmbda": 0.0}, model=model, teacher_model=tiny_model("llama", vocab_size=len(tokenizer)),
        train_dataset=Dataset.from_list(CHATS), processing_class=tokenizer,
    )  # fmt: skip
    for row, chat in zip(trainer.train_dataset, CHATS, strict=True):
        trained = [token for token, mask in zip(row["input_ids"], row["completion_mask"], strict=True) if mask]
        assert tokenizer.decode(trained).startswith(chat["messages"][1]["content"])
    assert "messages" not in trainer.train_dataset.column_names


def test_unused_embeddings_are_cut_and_a_smaller_vocabulary_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wide = tiny_model("llama", vocab_size=80, dtype=torch.float64)
    trainer = gkd(teacher_model=wide)
    trainer.train()
    assert "96 and 80 tokens" in caplog.text
    assert math.isfinite(trainer.state.log_history[0]["loss"])
    with pytest.raises(ValueError, match="GOLDTrainer"):
        gkd(teacher_model=tiny_model("llama", vocab_size=8, dtype=torch.float64))


@pytest.mark.parametrize(("settings", "sizes"), [({"lmbda": 1.0}, (96, 80)), ({"seq_kd": True}, (80, 96))])
def test_completions_have_tokens_that_both_models_know(settings: Any, sizes: tuple[int, int]) -> None:
    models = (
        tiny_model(name, vocab_size=size, dtype=torch.float64)
        for name, size in zip(("gpt2", "llama"), sizes, strict=True)
    )
    trainer = gkd(model=next(models), teacher_model=next(models), **settings)
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["loss"])


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"lmbda": 1.5}, "lmbda"),
        ({"beta": -0.1}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"lmbda": 0.5, "packing": True}, "packing"),
        ({"loss_type": "dft"}, "loss_type"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"teacher_model": None}, "teacher_model"),
        ({"teacher_model_init_kwargs": {"dtype": "float32"}}, "teacher_model_init_kwargs"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], names: str) -> None:
    with pytest.raises((ValueError, TypeError), match=names):
        gkd(**settings)


def test_a_teacher_that_is_the_student_is_refused() -> None:
    model = double("gpt2")
    with pytest.raises(ValueError, match="share weights"):
        gkd(model=model, teacher_model=model)


@pytest.mark.parametrize("lmbda", [0.0, 1.0])
def test_a_student_comes_closer_to_its_teacher(lmbda: float) -> None:
    trainer = gkd(
        lmbda=lmbda, beta=1.0, max_steps=60, learning_rate=1e-2, optim="adamw_torch", logging_steps=10,
        model=tiny_model("gpt2"), teacher_model=tiny_model("llama"), max_new_tokens=8,
    )  # fmt: skip
    before = trainer.evaluate(Dataset.from_list(fixed_rows()))["eval_loss"]
    trainer.train()
    assert trainer.evaluate(Dataset.from_list(fixed_rows()))["eval_loss"] < 0.7 * before


def test_the_static_methods_of_trl() -> None:
    student, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    labels = torch.tensor([[1, 2, -100], [-100, 4, -100]])
    values = divergence(student / 2, teacher / 2, beta=0.3)
    loss = GKDTrainer.generalized_jsd_loss
    given = {"beta": 0.3, "temperature": 2.0}
    torch.testing.assert_close(loss(student, teacher, labels, **given), values[labels != -100].mean())
    torch.testing.assert_close(loss(student, teacher, **given), values.sum() / 2)
    torch.testing.assert_close(
        loss(student, teacher, labels, **given, reduction="mean"), values[labels != -100].mean() / 5
    )
    torch.testing.assert_close(loss(student, teacher, **given, reduction="sum"), values.sum())


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_unreduced_divergence_is_per_vocabulary_entry(beta: float) -> None:
    """As in TRL: of the tokens that count, or of all without labels; by PyTorch's own divergence."""
    student, teacher = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 3, 5)
    labels = torch.tensor([[1, 2, -100], [-100, 4, -100]])
    log_p, log_q = (logits.log_softmax(-1) for logits in (student, teacher))
    mix = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    parts = [kl_div(mix, each, reduction="none", log_target=True) for each in (log_q, log_p)]
    expected = beta * parts[0] + (1 - beta) * parts[1]
    if beta in (0, 1):
        pair = (log_q, log_p) if beta else (log_p, log_q)
        expected = kl_div(*pair, reduction="none", log_target=True)
    loss = partial(GKDTrainer.generalized_jsd_loss, student, teacher, beta=beta, reduction="none")
    torch.testing.assert_close(loss(), expected, rtol=0, atol=1e-6)
    assert loss(labels=labels).shape == (3, 5)
    torch.testing.assert_close(loss(labels=labels), expected[labels != -100], rtol=0, atol=1e-6)
    torch.testing.assert_close(loss().sum(-1), divergence(student, teacher, beta=beta), rtol=0, atol=1e-6)


def test_generated_tokens_count_up_to_their_end() -> None:
    class Fixed:
        def generate(self, prompts: Tensor, **_: Any) -> Tensor:
            return torch.cat([prompts, torch.tensor([[7, 1, 1], [8, 9, 7]])], dim=1)

    prompts, mask = torch.tensor([[1, 5], [6, 7]]), torch.tensor([[0, 1], [1, 1]])
    found = GKDTrainer.generate_on_policy_outputs(
        Fixed(),
        {"prompts": prompts, "prompt_attention_mask": mask},
        GenerationConfig(eos_token_id=1),
        pad_token_id=1,
    )
    assert found[1].tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert found[2].tolist() == [[-100, -100, 7, 1, -100], [-100, -100, 8, 9, 7]]


@pytest.mark.parametrize("name", ["generalized_jsd_loss", "generate_on_policy_outputs"])
def test_an_override_that_training_does_not_call_is_refused(name: str) -> None:
    changed = type("Changed", (GKDTrainer,), {name: staticmethod(lambda *args, **kwargs: None)})
    with pytest.raises(TypeError, match=name):
        trainer_of(changed, GKDConfig, None, {}, model=double("gpt2"), teacher_model=double("llama"), train_dataset=Dataset.from_list(fixed_rows()))  # fmt: skip


def test_long_rows_lose_the_beginning_of_their_prompt() -> None:
    trainer = gkd(max_length=6)
    for row, given in zip(trainer.train_dataset, rows_with_prompts(), strict=True):
        assert row["input_ids"] == given["input_ids"][-6:]
        assert row["completion_mask"] == given["completion_mask"][-6:]


def test_rows_are_checked_where_completions_are_generated() -> None:
    plain = Dataset.from_list([{"input_ids": [3, 4, 5]}] * 8)
    gkd(train_dataset=plain)
    for settings, words in (
        ({"train_dataset": plain}, "8 of 8 rows have no prompt"),
        ({"completion_only_loss": False}, "8 of 8 rows have no prompt"),
        ({"max_length": 1}, "of 8 rows have no prompt|none of the rows|trained"),
        (
            {"model": tiny_model("llama", dtype=torch.float64, max_position_embeddings=8)},
            "context length is 8",
        ),
        ({"teacher_model": double("gpt2"), "max_new_tokens": 250}, "256 positions"),
    ):
        with pytest.raises(ValueError, match=words):
            gkd(lmbda=1.0, **settings)


def test_a_set_given_to_evaluate_is_that_of_the_constructor() -> None:
    tokenizer, rows = tiny_tokenizer("chatml"), Dataset.from_list(CHATS)
    size = len(tokenizer)
    trainer = trainer_of(
        GKDTrainer, GKDConfig, None, {"lmbda": 0.0}, model=tiny_model("gpt2", vocab_size=size),
        teacher_model=tiny_model("llama", vocab_size=size), train_dataset=rows, eval_dataset=rows, processing_class=tokenizer,
    )  # fmt: skip
    assert trainer.evaluate(rows)["eval_loss"] == trainer.evaluate()["eval_loss"]


def test_beta_may_change_during_a_run() -> None:
    trainer = gkd()
    first = trainer.evaluate(Dataset.from_list(fixed_rows()))["eval_loss"]
    trainer.beta = 0.0
    assert trainer.evaluate(Dataset.from_list(fixed_rows()))["eval_loss"] != first


def test_recorded_attributes() -> None:
    trainer = gkd(lmbda=1.0)
    assert trainer.teacher_model is trainer.teacher.model
    assert trainer.generation_config.max_new_tokens == 6 and trainer.generation_kwargs["temperature"] == 0.9


def test_another_loss_or_teacher_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="compute_loss_func"):
        trainer_of(
            GKDTrainer, GKDConfig, None, {}, model=double("gpt2"), teacher_model=double("llama"),
            train_dataset=Dataset.from_list(rows_with_prompts()), compute_loss_func=lambda *args, **kwargs: None,
        )  # fmt: skip
    with pytest.raises(TypeError, match="causal LM"):
        gkd(teacher_model=tiny_classifier("llama"))
