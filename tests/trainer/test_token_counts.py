"""Every completion token that a run samples is in one counted bucket, and a batch from which nothing is learned is spoken of."""

import logging

import pytest
import torch

from tests.trainer.grpo_runs import first_is_rare, logs, make, run
from trl.rollouts.experience import ADVANTAGE, CHOSEN, TRAINED
from trl.rollouts.token_counts import METRIC


def some_without(completion_ids, **_):
    return [None if ids[0] % 2 else float(len(ids)) for ids in completion_ids]


def tokens(entry):
    """The buckets of a log entry."""
    return {name.removeprefix(METRIC): n for name, n in entry.items() if name.startswith(METRIC)}


def count_sampled(trainer):
    """A list that will hold the number of tokens of every completion that the engine makes."""
    lengths, inner = [], trainer.engine.generate

    def generate(*args, **kwargs):
        found = inner(*args, **kwargs)
        lengths.extend(len(one.ids) for one in found)
        return found

    trainer.engine.generate = generate
    return lengths


FEW = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 7}
CASES = {
    "plain": ({}, {"trained"}),
    "equal rewards": ({"reward_funcs": first_is_rare}, {"trained", "zero_advantage"}),
    "no opinion": ({"reward_funcs": some_without}, {"trained", "reward_failed", "zero_advantage"}),
    "truncated": ({"mask_truncated_completions": True}, {"trained", "truncated"}),
    "refilled": (
        {**FEW, "reward_funcs": first_is_rare, "dynamic_sampling": True},
        {"trained", "zero_advantage"},
    ),
}
OF_GRPO = {
    "entropy": ({**FEW, "top_entropy_quantile": 0.3}, {"trained", "masked"}),
    "sampler": (
        {"data_seed": 1, "top_k": 20, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_cap": 1.0},
        {"trained", "masked"},
    ),
    "loss of batches": ({"scale_rewards": "batch", "reward_funcs": first_is_rare}, {"trained", "zero_advantage"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "case"),
    [*(("grpo", case) for case in {**CASES, **OF_GRPO}), ("rloo", "equal rewards"), ("rloo", "refilled")],
)
def test_every_sampled_token_is_in_one_bucket(method, case):
    settings, expected = {**CASES, **OF_GRPO}[case]
    trainer, _ = make(method, beta=0.0, log_format="dict", **settings)  # without the sample at the end
    lengths = count_sampled(trainer)
    trainer.train()
    found = tokens(logs(trainer)[-1])
    assert sum(found.values()) == sum(lengths) > 0
    # Which ratios round to more than the sampler's cap of 1.0 differs between kernels, and with it what is sampled later.
    may_be = {"zero_advantage"} if case == "sampler" else set()
    assert {name for name, count in found.items() if count} - may_be == expected


def test_the_buckets_of_one_window_by_hand():
    trainer, _ = make(mask_truncated_completions=True, reward_funcs=first_is_rare, max_completion_length=4)
    experience = trainer.make_rollout_batch(1)
    lengths, stopped = experience.completions.lengths, experience.per_row["stopped"].bool()
    flat = stopped & (experience.per_row[ADVANTAGE] == 0)
    expected = {
        "truncated": lengths[~stopped].sum(),
        "zero_advantage": lengths[flat].sum(),
        "trained": lengths[stopped & ~flat].sum(),
    }
    found = tokens(trainer._token_counts.logged())
    assert found == {name: float(count) for name, count in expected.items() if count}
    assert len(found) == 3


def test_tokens_of_low_entropy_are_masked_from_the_first_pass_on():
    settings = {**FEW, "top_entropy_quantile": 0.3, "max_steps": 8}
    trainer, _ = make(**settings)
    unchosen, inner = [], trainer.prepare_step

    def prepare_step(batches):
        inner(batches)
        rows = [batch["experience"].per_token for batch in batches]
        unchosen.append(sum(int((columns[TRAINED] & ~columns[CHOSEN]).sum()) for columns in rows))

    trainer.prepare_step = prepare_step
    trainer.train()
    masked = [tokens(entry).get("masked", 0.0) for entry in logs(trainer)]
    first = [
        unchosen[0],
        unchosen[1],
        0,
        0,
        unchosen[4],
        unchosen[5],
        0,
        0,
    ]  # of two steps and two passes each
    assert masked == torch.tensor(first, dtype=torch.float64).cumsum(0).tolist()


# ---- nothing to learn


def constant(completions, **_):
    return [0.1] * len(completions)


def nobody(completions, **_):
    return [None] * len(completions)


NOTHING = {
    "equal rewards": ({"reward_funcs": constant}, "the rewards of each group are equal", "zero_advantage"),
    "no reward": ({"reward_funcs": nobody}, "every reward function returned None", "reward_failed"),
    "all truncated": (
        {"mask_truncated_completions": True, "generation_kwargs": {"min_new_tokens": 4}, "max_completion_length": 4},
        "reached max_completion_length",
        "truncated",
    ),
}  # fmt: skip


def assert_nothing_learned(trainer, keep, bucket):
    for entry in logs(trainer):
        assert abs(entry["loss"]) < 1e-15 and entry["grad_norm"] == 0  # RLOO adds up advantages
        found = tokens(entry)
        assert found["trained"] == 0 and found[bucket] > 0
        assert entry.get("frac_reward_zero_std", 1) == 1 or bucket == "truncated"
    assert keep.steps and not any(value.any() for step in keep.steps for value in step.values())


@pytest.mark.parametrize("method", ["grpo", "rloo"])
@pytest.mark.parametrize("case", NOTHING)
def test_a_batch_without_a_lesson_has_a_loss_of_zero_and_is_spoken_of_once(method, case, caplog):
    settings, words, bucket = NOTHING[case]
    with caplog.at_level(logging.WARNING, logger="trl"):
        trainer, keep = run(method, beta=0.0, max_steps=3, num_generations=4, **settings)
    assert_nothing_learned(trainer, keep, bucket)
    said = [record.getMessage() for record in caplog.records if "is trained" in record.getMessage()]
    assert len(said) == 1 and words in said[0] and f"({bucket} " in said[0]
