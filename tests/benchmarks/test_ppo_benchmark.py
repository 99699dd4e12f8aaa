"""The loop that our PPO is measured against does the same work: it learns the same from the same answers. No times."""

import copy

import torch
from benchmarks.data import BPE_SIZE, load_corpus
from benchmarks.group_loops import Completed, Work, pad_left, prompts_of
from benchmarks.ppo import run_in_turn
from benchmarks.ppo_loops import PaddedPPO, make_ppo_trainer
from benchmarks.variants import build_model, build_reward_model


def completed(window) -> Completed:
    """The trainer's answers in the loop's rows."""
    ids, mask = pad_left([row.tolist() for row in window.prompts.split()], "cpu")
    answers, real = window.completions.padded(), window.completions.mask.long()
    completion = torch.cat([torch.zeros_like(mask), real], dim=1)
    return Completed(torch.cat([ids, answers], 1), torch.cat([mask, real], 1), completion, ids.shape[1])


def work_of(corpus) -> Work:
    prompts = prompts_of(corpus, questions=1, count=8)
    return Work(prompts, 12, list(range(1, 400)), prompts=8, group=1, micro=4, learning_rate=0.05)


def test_both_learn_the_same_from_the_same_answers():
    corpus = load_corpus(None, max_length=512, rows=8)
    work, models = work_of(corpus), (build_model("tiny", BPE_SIZE), build_reward_model("tiny", BPE_SIZE))
    loop = PaddedPPO(*models, work, epochs=2)
    loop.optimizer = torch.optim.SGD(loop.trained, lr=work.learning_rate)
    trainer = make_ppo_trainer(*models, work, corpus.tokenizer, batches=1, epochs=2)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=work.learning_rate)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    window = trainer._rollout_batch
    assert 8 < len(window.completions.values) < 8 * 12
    found = completed(window)
    rolled = loop.rolled(found)
    real = window.completions.mask
    for name, column in {
        "values": rolled.values,
        "advantages": rolled.advantages,
        "returns": rolled.returns,
    }.items():
        torch.testing.assert_close(window.per_token[name], column[real], rtol=0, atol=1e-5, msg=name)
    loop.update(found, rolled)
    after = trainer.model.state_dict()
    assert max(float((after[name] - weight).abs().max()) for name, weight in before.items()) > 1e-3
    theirs = {
        **{f"policy.{name}": weight for name, weight in loop.model.state_dict().items()},
        **{f"value_model.{name}": weight for name, weight in loop.value_model.state_dict().items()},
    }
    assert theirs.keys() == after.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=2e-6, msg=name)


def test_a_run_measures_both_on_the_same_prompts():
    corpus = load_corpus(None, max_length=512, rows=8)
    models = build_model("tiny", BPE_SIZE), build_reward_model("tiny", BPE_SIZE)
    found = run_in_turn(models, work_of(corpus), corpus.tokenizer, batches=1, epochs=2)
    for side in ("ours", "bare"):
        [spent] = found[side]
        assert spent.tokens >= 8
        assert all(seconds > 0 for seconds in spent.seconds.values())
