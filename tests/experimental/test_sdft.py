"""SDFT: the teacher is the student, shown more: what is learned, from whom, and what is refused."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from datasets import Dataset
from examples import self_distillation
from torch import Tensor

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.grpo_runs import SETTINGS
from tests.trainer.one_step import KeepGradients
from tests.trainer.resume_worker import ending
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.models.packed.layout import TEACHER_BATCH
from trl.objectives.distillation import divergence, top_k_divergence
from trl.rollouts.experience import TEACHER_PROMPTS

TEXTS = ["What colour is the sky?", "How many apples are left?", "Look up.", "Next."]
ROWS = [{"prompt": text, "privileged_context": f"It is {number}."} for number, text in enumerate(TEXTS)]
ONE = {
    "max_steps": 1,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "distillation_mode": "full_logits",
}


def make(folder: str | None = None, rows: Any = None, **settings: Any) -> tuple[Any, KeepGradients]:
    keep, tokenizer = KeepGradients(), tiny_tokenizer("chatml")
    model = settings.pop("model", None) or tiny_model("gpt2", vocab_size=len(tokenizer), dtype=torch.float64)
    given = {
        name: value
        for name, value in {**SETTINGS, **ONE, **settings}.items()
        if name not in ("beta", "num_generations_eval")
    }
    args = SDFTConfig(folder or tempfile.mkdtemp(), **given)
    data = Dataset.from_list(ROWS if rows is None else rows)
    return SDFTTrainer(model, args, data, processing_class=tokenizer, callbacks=[keep]), keep


def run(**settings: Any) -> tuple[Any, KeepGradients]:
    trainer, keep = make(**settings)
    trainer.train()
    return trainer, keep


def logits(model: Any, prompts: Any, completions: Any) -> list[Tensor]:
    found = []
    for prompt, completion in zip(prompts.split(), completions.split(), strict=True):
        with torch.no_grad():
            whole = model(input_ids=torch.cat([prompt, completion])[None]).logits[0]
        found.append(whole[len(prompt) - 1 : -1])
    return found


def row_losses(model: Any, trainer: Any, loss: Any) -> list[Tensor]:
    """The losses of the tokens of each completion, with the initial weights on both sides."""
    rows = trainer._rollout_batch
    own, theirs = (logits(model, prompts, rows.completions) for prompts in (rows.prompts, rows.more[TEACHER_PROMPTS]))
    return [loss(*pair) for pair in zip(own, theirs, strict=True)]


def initial() -> Any:
    return tiny_model("gpt2", vocab_size=len(tiny_tokenizer("chatml")), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["base", "live", "ema"])
@pytest.mark.parametrize("mode", ["full_logits", "topk_logits"])
def test_the_loss_is_the_mean_over_completions_of_their_mean_divergence(kind: str, mode: str) -> None:
    topk = 7 if mode == "topk_logits" else 100
    trainer, keep = run(teacher_model_kind=kind, distillation_mode=mode, distillation_topk=topk, distillation_alpha=0.3)

    def loss(own: Tensor, theirs: Tensor) -> Tensor:
        if mode == "full_logits":
            return divergence(own, theirs, beta=0.3)
        tokens = own.topk(7).indices
        kept = theirs.log_softmax(-1).gather(-1, tokens)
        return top_k_divergence(own, tokens, kept, beta=0.3, tail=False)

    found = row_losses(initial(), trainer, loss)
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(torch.stack([row.mean() for row in found]).mean().item(), rel=1e-6)
    expected = torch.cat(found).mean().item()
    assert log["self_distillation/distillation_loss"] == pytest.approx(expected, rel=1e-9)
    assert max(gradient.abs().max() for gradient in keep.steps[0].values()) > 1e-5


def test_the_sampled_token_estimates_the_reverse_kl() -> None:
    trainer, keep = run(distillation_mode="sampled_token", distillation_alpha=1.0)
    model, rows = initial(), trainer._rollout_batch
    losses = []
    for prompt, shown, completion in zip(
        rows.prompts.split(), rows.more[TEACHER_PROMPTS].split(), rows.completions.split(), strict=True
    ):
        logps = [
            model(input_ids=torch.cat([start, completion])[None]).logits[0, len(start) - 1 : -1].log_softmax(-1)
            for start in (prompt, shown)
        ]
        own, theirs = (x.gather(1, completion[:, None])[:, 0] for x in logps)
        losses.append(((own - theirs).detach() * own).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(keep.steps[0][name], parameter.grad, rtol=1e-8, atol=1e-12)


def test_the_teacher_is_shown_prompt_and_context() -> None:
    trainer, _ = make(teacher_prompt_template="{privileged_context} {prompt} {privileged_context}")
    rows = trainer.make_rollout_batch(0)
    texts = {row["prompt"]: f"{row['privileged_context']} {row['prompt']} {row['privileged_context']}" for row in ROWS}
    decode = tiny_tokenizer("chatml").decode
    for own, shown in zip(rows.prompts.split(), rows.more[TEACHER_PROMPTS].split(), strict=True):
        assert decode(shown) == texts[decode(own)]
    batch = rows.as_batch(prefix_sharing=True)
    assert torch.equal(batch[TEACHER_BATCH]["scored_target"], batch["scored_target"])


@pytest.mark.parametrize(("role", "content", "user"), [("role", "content", "user"), ("from", "value", "human")])
def test_the_last_message_of_a_conversation_has_the_context(role: str, content: str, user: str) -> None:
    chats = [
        {
            "prompt": [{role: user, content: row["prompt"]}],
            "privileged_context": [{role: user, content: "Seven."}],
        }
        for row in ROWS
    ]
    trainer, _ = make(rows=chats)
    rows = trainer.make_rollout_batch(0)
    shown = tiny_tokenizer("chatml").decode(rows.more[TEACHER_PROMPTS].row(0))
    assert shown.count("Seven.") == 1 and shown.index("Seven.") < shown.rindex("assistant")


def test_generating_from_the_teachers_prompts_learns_on_the_students() -> None:
    trainer, _ = make(generate_from_teacher=True)
    rows, plain = trainer.make_rollout_batch(0), make()[0].make_rollout_batch(0)
    assert torch.equal(rows.prompts.values, plain.prompts.values)
    assert not torch.equal(rows.completions.values, plain.completions.values)
    assert not trainer.sampler_is_exact


def test_later_steps_on_a_rollout_batch_weigh_tokens_by_their_ratio() -> None:
    """The ratios are 1 in the first step, and where nothing was updated."""
    stale = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.3, "temperature": 1.3}
    clipped, plain = (run(**stale, distillation_is_clip=clip)[1].steps for clip in (1.5, None))
    for name, gradient in plain[0].items():
        torch.testing.assert_close(clipped[0][name], gradient, rtol=1e-12, atol=1e-15)
    assert any(not torch.allclose(clipped[1][name], gradient) for name, gradient in plain[1].items())
    still = [run(**{**stale, "learning_rate": 0.0}, distillation_is_clip=clip)[1].steps[1] for clip in (1.5, None)]
    for name, gradient in still[1].items():
        torch.testing.assert_close(still[0][name], gradient, rtol=1e-9, atol=1e-12)


def test_the_first_tokens_may_be_left_out() -> None:
    trainer, _ = run(num_loss_tokens_to_skip=2)
    found = row_losses(initial(), trainer, lambda own, theirs: divergence(own, theirs, beta=0.5)[2:])
    means = torch.stack([row.mean() for row in found if len(row)])
    assert trainer.state.log_history[0]["loss"] == pytest.approx(means.mean().item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["base", "ema"])
def test_a_resumed_run_ends_in_the_same_bits(kind: str, tmp_path: Any) -> None:
    settings = {
        "max_steps": 5, "save_strategy": "steps", "save_steps": 3, "num_iterations": 2, "teacher_model_kind": kind,
        "optim": "adamw_torch", "learning_rate": 1e-2,
    }  # fmt: skip
    whole, resumed = (make(str(tmp_path / "run"), **settings)[0] for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert ending(resumed) == ending(whole)
    assert all(
        torch.equal(*pair)
        for pair in zip(whole.teacher.model.parameters(), resumed.teacher.model.parameters(), strict=True)
    )
    moved = any(
        not torch.equal(own, first)
        for own, first in zip(whole.teacher.model.parameters(), initial().parameters(), strict=True)
    )
    assert moved == (kind == "ema")


def test_what_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="row 1: privileged_context"):
        make(rows=[ROWS[0], {**ROWS[1], "privileged_context": None}])
    with pytest.raises(ValueError, match="no column 'privileged_context'"):
        make(rows=[{"prompt": "Next."}])
    with pytest.raises(ValueError, match="row 0: the prompt ends with"):
        make(rows=[{"prompt": [{"role": "assistant", "content": "a"}], "privileged_context": "b"}])
    with pytest.raises(ValueError, match="row 0: the prompt ends with a message of 'assistant'"):
        make(rows=[{"prompt": [{"from": "gpt", "value": "a"}], "privileged_context": "b"}])
    with pytest.raises(ValueError, match="row 1: the prompt is None"):
        make(rows=[ROWS[0], {**ROWS[1], "prompt": None}])
    with pytest.raises(ValueError, match="privileged_context"):
        SDFTConfig(str(tmp_path), teacher_prompt_template="{prompt}", use_cpu=True)
    with pytest.raises(ValueError, match="distillation_alpha"):
        SDFTConfig(str(tmp_path), distillation_mode="sampled_token", use_cpu=True)
    with pytest.raises(TypeError, match="use_teacher_server"):
        SDFTConfig(str(tmp_path), use_teacher_server=True, use_cpu=True)  # type: ignore[call-arg]


@pytest.mark.slow
def test_what_was_known_is_kept_better_than_by_sft(tmp_path: Any) -> None:
    """`examples/self_distillation.py`, each stage cut short: of 65 %, SFT keeps 37 and SDFT 59."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(self_distillation.FIRST, "logging_steps", 25)
        patch.setattr(self_distillation, "KNOWS", 0.6)
        patch.setattr(self_distillation, "LEARNT", 0.0)
        methods = "SFT", "SDFT, forward KL"
        result = self_distillation.run(seed=0, folder=str(tmp_path), methods=methods)
    (steps, by_sft), (of_sdft, by_sdft) = (result.after[method] for method in methods)
    assert steps == of_sdft == self_distillation.EVERY
    known = [self_distillation.mean_known(found) for found in (result.before, by_sft, by_sdft)]
    assert known[0] >= 0.6 and known[1] < 0.7 * known[0] and known[2] > 0.8 * known[0]
    assert by_sdft["difference"] > result.before["difference"]
