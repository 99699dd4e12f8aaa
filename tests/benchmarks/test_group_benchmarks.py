"""Our steps of GRPO and online DPO and the hand-written ones do the same work: same losses, same gradients. No times."""

import copy
from dataclasses import replace

import pytest
import torch
from benchmarks.data import GSM8K_LENGTHS, made_up_corpus, word_tokenizer
from benchmarks.group_loops import (
    LOOPS,
    PHASES,
    Completed,
    PaddedGRPO,
    Phases,
    Work,
    make_trainer,
    pad_left,
    prompts_of,
)
from benchmarks.group_sharing import time_sharing
from benchmarks.variants import build_model


@pytest.fixture(scope="module")
def work() -> Work:
    corpus = made_up_corpus(GSM8K_LENGTHS, max_length=48, rows=32, name="test")
    rows = prompts_of(corpus, questions=2, count=4)
    return Work(rows, 8, list(range(1, 1000)), prompts=2, group=4, micro=4)


def completed(experience) -> Completed:
    """Our completions, as the loop has them."""
    ids, mask = pad_left([row.tolist() for row in experience.prompts.split()], "cpu")
    drawn, real = experience.completions.padded(), experience.completions.mask.long()
    completion = torch.cat([torch.zeros_like(mask), real], dim=1)
    return Completed(torch.cat([ids, drawn], 1), torch.cat([mask, real], 1), completion, ids.shape[1])


@pytest.mark.parametrize(("method", "group", "column"), [("grpo", 4, "advantage"), ("online-dpo", 2, "scores")])
def test_loss_and_gradient_are_those_of_our_trainer(work: Work, method: str, group: int, column: str) -> None:
    work = replace(work, method=method, group=group, prompts=8 // group)
    model = build_model("tiny", 5000)
    loop = LOOPS[method](model, work)
    with torch.no_grad():
        for parameter in loop.reference.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.01)
    trainer = make_trainer(copy.deepcopy(model), work, word_tokenizer(), steps=1)
    trainer.reference.module.load_state_dict(loop.reference.state_dict())
    batches, count = trainer.get_batch_samples(iter(range(2)), 2, torch.device("cpu"))
    trainer.model.train()
    losses = [trainer.compute_loss(trainer.model, batch, num_items_in_batch=count) for batch in batches]
    sum(losses).backward()

    window = trainer._rollout_batch
    found = completed(window)
    lists = [row.tolist() for row in window.completions.split()]
    assert found.lists == lists and len({len(ids) for ids in lists}) > 1
    advantages = loop.advantages(found)
    torch.testing.assert_close(advantages, window.per_row[column].float(), rtol=0, atol=1e-5)
    reference = [loop.reference_logps(part) for part in loop.parts(found)]
    expected = loop.backward(found, advantages, reference)
    assert sum(loss.item() for loss in losses) == pytest.approx(expected, abs=1e-6)
    for mine, other in zip(trainer.model.parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-6)


def test_the_loop_ends_completions_at_their_first_stop_token(work: Work) -> None:
    torch.manual_seed(0)
    loop = PaddedGRPO(build_model("tiny", 5000), work)
    found = loop.generate([prompt for prompt in work.prompts_of(0) for _ in range(work.group)])
    assert found.ids.shape[0] == 8 and found.width == max(map(len, work.prompts_of(0)))
    for ids in found.lists:
        assert not set(ids[:-1]) & set(work.stops)
        assert ids[-1] in work.stops or len(ids) == 8
    spent = loop.step(work.prompts_of(1))
    assert list(spent.seconds) == list(PHASES) and min(spent.seconds.values()) > 0
    assert 8 <= spent.tokens <= 64


def test_phases_add_up_to_a_step(work: Work) -> None:
    trainer = make_trainer(build_model("tiny", 5000), work, word_tokenizer(), steps=1)
    phases = Phases(trainer, "cpu")
    phases.start()
    trainer.train()
    spent = phases.stop(10)
    assert spent.tokens == 10 and min(spent.seconds.values()) > 0


def test_a_shared_prompt_is_the_same_update_with_fewer_operations() -> None:
    work = Work([], 0, [], prompts=1, group=4, micro=4)
    found = time_sharing(4, build_model("tiny", 5000), work, steps=1, completion=8)
    assert [len(seconds) for seconds in found.seconds.values()] == [1, 1]
    assert 0.5 < found.operations < 0.75
