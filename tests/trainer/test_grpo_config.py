"""GRPOConfig and RLOOConfig: the command line, what is refused, what is said to do nothing."""

import dataclasses
import json
import pickle
import warnings

import pytest

from trl.options.secrets import unwritten
from trl.scripts.parser import TrlParser
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.rloo_config import RLOOConfig

OLDER_RLOO = {
    "rloo_k": ("num_generations", 4),
    "cliprange": ("epsilon", 0.1),
    "kl_coef": ("beta", 0.2),
    "exp_name": ("run_name", "mine"),
    "normalize_reward": ("normalize_advantages", True),
    "num_ppo_epochs": ("num_iterations", 3),
    "num_mini_batches": ("steps_per_generation", 2),
    "response_length": ("max_completion_length", 53),
}  # the migration guide


def config(kind=GRPOConfig, **given):
    return kind("out", use_cpu=True, **given)


@pytest.mark.parametrize(("given", "kept"), [(True, "group"), (False, "none"), ("batch", "batch"), ("none", "none")])
def test_scale_rewards_takes_the_older_yes_and_no(given, kept):
    assert config(scale_rewards=given).scale_rewards == kept


def test_sizes_are_filled_in():
    args = config(per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=8)
    assert (args.generation_batch_size, args.steps_per_generation) == (32, 8)
    sizes = args.rollout_sizes()
    assert (sizes.rows, sizes.mini_batches, sizes.micro_batches, sizes.passes) == (32, 4, 2, 1)
    again = dataclasses.replace(args, learning_rate=1e-5)  # with both sizes given now
    assert (again.generation_batch_size, again.rollout_sizes()) == (32, sizes)
    assert config(per_device_train_batch_size=8, num_iterations=3).rollout_sizes().steps == 3


@pytest.mark.parametrize(("steps", "accumulated", "together"), [(3, 2, 6), (1, 2, 2), (6, 4, 12)])
@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig])
def test_generations_that_are_no_multiple_of_a_step_are_said(kind, steps, accumulated, together):
    given = {
        "per_device_train_batch_size": 8,
        "steps_per_generation": steps,
        "gradient_accumulation_steps": accumulated,
    }
    expected = f"steps_per_generation={steps} is no multiple of gradient_accumulation_steps={accumulated}: the completions of {together} "
    with pytest.warns(UserWarning, match=expected):
        config(kind, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(kind, **{**given, "steps_per_generation": 2 * accumulated})


def test_a_bound_of_cispo_that_cuts_every_weight_is_said():
    with pytest.warns(
        UserWarning, match=r"cispo' takes epsilon_high=0\.2 as the largest weight .*Set epsilon_high to 5"
    ):
        config(loss_type="cispo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(loss_type="cispo", epsilon_high=5.0)


def test_older_names_of_rloo_move_with_one_warning():
    older = {name: value for name, (_, value) in OLDER_RLOO.items()}
    with pytest.warns(FutureWarning, match="rloo_k -> num_generations; cliprange -> epsilon") as caught:
        args = config(RLOOConfig, **older)
    assert len([warning for warning in caught if "rloo_k" in str(warning.message)]) == 1
    for name, (place, value) in OLDER_RLOO.items():
        assert getattr(args, place) == value and getattr(args, name) is None, name


# ---- the advantage estimator


def ranks(rewards, group_size):
    return rewards.view(-1, group_size).argsort(dim=1).argsort(dim=1).to(rewards).flatten()


def test_an_estimator_is_a_name_or_a_function():
    assert (config().estimator, config(scale_rewards="batch").estimator) == ("scaled_by_group", "scaled_by_batch")
    assert (config().reward_scale, config(advantage_estimator="scaled_by_batch").reward_scale) == ("group", "batch")
    assert config(RLOOConfig).advantage_estimator == "leave_one_out"
    for kind in (GRPOConfig, RLOOConfig):
        args = config(kind, advantage_estimator=ranks)
        assert pickle.loads(pickle.dumps(unwritten(args))).advantage_estimator == "ranks"
        assert json.loads(args.to_json_string())["advantage_estimator"] == "ranks"
        with pytest.raises(ValueError, match=r"unknown advantage_estimator 'rank'; known are 'leave_one_out'"):
            config(kind, advantage_estimator="rank")
        for wrong in (len, 3):
            with pytest.raises(
                TypeError, match=r"advantage_estimator must be a name or a function of \(rewards, group_size\)"
            ):
                config(kind, advantage_estimator=wrong)
    with pytest.warns(UserWarning, match=r"scale_rewards='batch' has no effect with an advantage_estimator"):
        config(scale_rewards="batch", advantage_estimator="unscaled")


@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig])
def test_the_command_line_takes_the_name_of_an_estimator(kind):
    (args,) = TrlParser(kind).parse_args_and_config(["--use_cpu", "--advantage_estimator", "unscaled"])
    assert args.advantage_estimator == "unscaled"
