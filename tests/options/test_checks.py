"""Numbers and booleans given as text are read as on the command line; numbers out of range are refused by one table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pytest

from trl import (
    BCOConfig,
    CPOConfig,
    DatasetMixtureConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ModelConfig,
    ORPOConfig,
    PPOConfig,
    PRMConfig,
    RewardConfig,
    RLOOConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
)
from trl.experimental.ppo import PPOConfig as DataSetPPOConfig
from trl.options.checks import check_at_least, json_object, kinds
from trl.scripts.parser import options_of

if TYPE_CHECKING:
    from decimal import Decimal

TRAINING = (
    BCOConfig, CPOConfig, DPOConfig, GRPOConfig, KTOConfig, ORPOConfig, PRMConfig, RewardConfig, RLOOConfig, SFTConfig,
    DataSetPPOConfig,
)  # fmt: skip
CONFIGS = (*TRAINING, PPOConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig)


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_number_and_boolean_has_the_reader_of_the_command_line(kind):
    fields = {name: entry for name, entry in kinds(kind).items() if entry.reader is not None}
    actions = options_of(TrlParser(kind))
    readers = {entry.reader for entry in fields.values()}
    by_argparse = {name for name, action in actions.items() if action.type in readers}
    assert set(fields) == by_argparse - {"include_num_input_tokens_seen"}  # text or a boolean: stays text
    assert {name: entry.reader for name, entry in fields.items()} == {name: actions[name].type for name in fields}
    assert {name for name, entry in fields.items() if entry.is_list} == {
        name for name in fields if actions[name].nargs == "+"
    }


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (SFTConfig, {"learning_rate": "1e-5", "packing": "no", "num_train_epochs": "3", "max_steps": "-1"}),
        (SFTConfig, {"packing": "YES", "max_length": "16", "bf16": "false", "completion_only_loss": "true"}),
        (DPOConfig, {"beta": "0.2", "precompute_ref_log_probs": "0", "loss_weights": ["1", "2e0"],
                     "loss_type": ["sigmoid", "sft"]}),
        (GRPOConfig, {"beta": "0.1", "num_generations": "4", "reward_weights": "0.5"}),
        (PPOConfig, {"batch_size": "8", "mini_batch_size": "4", "adap_kl_ctrl": "f", "max_grad_norm": "inf"}),
        (ModelConfig, {"use_peft": "y", "lora_r": "8", "lora_dropout": "0"}),
        (ScriptArguments, {"dataset_streaming": "no"}),
    ],
)  # fmt: skip
def test_text_in_python_is_what_the_command_line_reads(tmp_path, kind, given):
    trains = {"output_dir": str(tmp_path), "use_cpu": "1"} if kind in TRAINING else {}
    line = [
        word
        for name, value in {**trains, **given}.items()
        for word in (f"--{name}", *(value if isinstance(value, list) else [value]))
    ]
    (expected,) = TrlParser(kind).parse_args_and_config(line)
    config = kind(**trains, **given)
    for name in given:
        value = getattr(config, name)
        assert value == getattr(expected, name)
        assert type(value) is type(getattr(expected, name)) is not str


def test_text_of_no_value_is_refused_field_by_field_at_once(tmp_path):
    with pytest.raises(ValueError) as caught:
        SFTConfig(str(tmp_path), packing="maybe", max_steps="2.5", learning_rate="")
    assert set(str(caught.value).split("\n")) == {
        "packing must be true or false, got 'maybe'.",
        "max_steps must be a whole number, got '2.5'.",
        "learning_rate must be a number, got ''.",
    }


@pytest.mark.parametrize("kind", [SFTConfig, DataSetPPOConfig])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rate": math.nan}, "learning_rate must be a finite number >= 0, got nan."),
        ({"weight_decay": -0.1}, "weight_decay must be >= 0, got -0.1."),
        ({"num_train_epochs": math.inf}, "num_train_epochs must be a finite number >= 0, got inf."),
        ({"max_steps": -3}, "max_steps must be >= 0 or -1, got -3."),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be a number >= 0, got nan."),
        ({"seed": -1}, "seed must be >= 0, got -1."),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_numbers_that_mean_nothing_are_refused_by_every_config(tmp_path, kind, given, message):
    with pytest.raises(ValueError) as caught:
        kind(str(tmp_path), **given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("config", "given"),
    [
        *((config, {"beta": wrong}) for config in (GRPOConfig, DPOConfig) for wrong in (None, [0.1], {"a": 0.1})),
        (GRPOConfig, {"vespo_k_pos": None}),
        (GRPOConfig, {"epsilon": [0.2]}),
        (GRPOConfig, {"delta": [2.0]}),
        (DPOConfig, {"discopop_tau": [0.05]}),
    ],
)
def test_none_lists_and_dicts_are_no_numbers(tmp_path, config, given):
    with pytest.raises(TypeError, match=next(iter(given))):
        config(str(tmp_path), **given)


def test_all_numbers_out_of_range_are_named_at_once(tmp_path):
    with pytest.raises(ValueError) as caught:
        SFTConfig(str(tmp_path), learning_rate=-1.0, weight_decay=math.nan, save_total_limit=-2)
    assert str(caught.value).count("\n") == 2
    with pytest.raises(ValueError, match="lora_alpha must be a finite number"):
        ModelConfig(use_peft=True, lora_alpha=math.nan)
    with pytest.raises(ValueError, match=r"vf_coef must be >= 0, got -0\.1"):
        PPOConfig(vf_coef=-0.1)


@pytest.mark.filterwarnings("ignore:f_alpha_divergence_coef=-2.0 has no effect")
def test_sentinels_and_limits_without_end_stay(tmp_path):
    args = SFTConfig(str(tmp_path), max_steps=-1, max_grad_norm=math.inf, warmup_steps=0.1)
    assert (args.max_steps, args.max_grad_norm) == (-1, math.inf)
    assert DPOConfig(str(tmp_path), label_pad_token_id=-100).label_pad_token_id == -100
    assert DPOConfig(str(tmp_path), f_alpha_divergence_coef=-2.0).f_alpha_divergence_coef == -2.0
    grpo = GRPOConfig(str(tmp_path), reward_weights=[-1.0], reward_deadline=math.inf, epsilon_high=math.inf, top_k=0)
    assert (grpo.reward_weights, grpo.epsilon_high) == ([-1.0], math.inf)


def test_no_trackers_by_none(tmp_path):
    """transformers takes None for a name and fails on it."""
    assert SFTConfig(str(tmp_path), report_to=None).report_to == []


@dataclass
class OwnFields(SFTConfig):
    """A program's config."""

    shift: float = -1.0
    unknown: float = math.nan
    steps: int | None = None
    mode: bool | Literal["auto"] = False


@dataclass
class OwnType(SFTConfig):
    """A program's config with a type that is not there at run time."""

    exact: Decimal | None = None


def test_a_programs_own_fields_have_no_bounds_and_may_be_text(tmp_path):
    config = OwnFields(str(tmp_path), steps="-3", mode="auto", learning_rate="1e-5")  # type: ignore[arg-type]
    assert (config.shift, config.steps, config.mode, config.learning_rate) == (-1.0, -3, "auto", 1e-5)
    assert math.isnan(config.unknown)
    assert OwnType(str(tmp_path), max_steps="4").max_steps == 4  # type: ignore[arg-type]
    for kind in (OwnFields, OwnType):
        with pytest.raises(ValueError, match=r"weight_decay must be >= 0, got -0\.1"):
            kind(str(tmp_path), weight_decay=-0.1)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        ({"per_device_eval_batch_size": -1}, "per_device_eval_batch_size"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"learning_rate": -1e-4}, "learning_rate"),
        ({"max_steps": 0}, "max_steps"),
        ({"num_train_epochs": 0}, "num_train_epochs"),
        ({"num_train_epochs": -1, "max_steps": -1}, "num_train_epochs"),
    ],
)
def test_numbers_with_which_no_run_can_be_made(tmp_path, given, name):
    with pytest.raises(ValueError, match=f"{name}.* got"):
        SFTConfig(str(tmp_path), **given)


def test_numbers_that_are_unusual_and_fine(tmp_path):
    args = SFTConfig(str(tmp_path), learning_rate=0.0, num_train_epochs=0, max_steps=3)
    assert (args.learning_rate, args.max_steps) == (0.0, 3)
    assert SFTConfig(str(tmp_path), num_train_epochs=0.5, max_steps=-1).num_train_epochs == 0.5


def test_prefetching_without_workers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dataloader_prefetch_factor"):
        SFTConfig(str(tmp_path), dataloader_prefetch_factor=4)


def test_deepspeed_without_its_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr("trl.options.training.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'trl\[deepspeed\]'"):
        SFTConfig(str(tmp_path), deepspeed={"zero_optimization": {"stage": 2}})


def test_the_best_model_needs_an_evaluation_at_each_save(tmp_path):
    def config(**steps):
        return SFTConfig(str(tmp_path), eval_strategy="steps", load_best_model_at_end=True, report_to="none", **steps)

    with pytest.raises(
        ValueError, match=r"save_steps to be a multiple of eval_steps, got 5 and 3\. Set save_steps to 3\."
    ):
        config(save_steps=5, eval_steps=3)
    with pytest.raises(ValueError, match=r"got 5 and 10 \(of logging_steps\)"):
        config(save_steps=5)
    with pytest.raises(ValueError, match=r"got 0\.2 and 3"):
        config(save_steps=0.2, eval_steps=3)
    assert [config(save_steps=6, eval_steps=3).save_steps, config(save_steps=0.3, eval_steps=0.1).save_steps] == [
        6,
        0.3,
    ]


def test_evaluations_that_are_never_made_are_told(tmp_path):
    with pytest.warns(UserWarning, match=r"eval_steps=10 has no effect with eval_strategy='no'\. Set it to 'steps'"):
        SFTConfig(str(tmp_path), eval_steps=10)


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_lion_32bit"])
def test_an_optimiser_of_bitsandbytes_without_it(tmp_path, monkeypatch, name):
    monkeypatch.setattr("trl.options.training.find_spec", lambda package: None)
    with pytest.raises(
        ImportError, match=rf"optim='{name}' needs bitsandbytes\. Run `pip install 'trl\[quantization\]'`"
    ):
        SFTConfig(str(tmp_path), optim=name)
    assert SFTConfig(str(tmp_path), optim="adamw_torch").optim == "adamw_torch"


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-3, ValueError), (1.5, TypeError), ("8", TypeError), (True, TypeError)],
)
def test_check_at_least_refuses_small_numbers_and_other_types(value, error):
    check_at_least("max_length", None, minimum=1)
    check_at_least("max_length", 1, minimum=1)
    with pytest.raises(error, match="max_length"):
        check_at_least("max_length", value, minimum=1)
    with pytest.raises(TypeError):
        check_at_least("lora_r", None, minimum=1, optional=False)


def test_json_objects_are_read_from_text():
    given = {"a": 1}
    assert json_object("kwargs", given) is given and json_object("kwargs", None) is None
    assert json_object("kwargs", '{"dtype": "float32", "n": [1, 2]}') == {"dtype": "float32", "n": [1, 2]}
    for text in ("{broken", "[1, 2]", "float32"):
        with pytest.raises(ValueError, match="kwargs must be a JSON object"):
            json_object("kwargs", text)


def test_warnings_about_settings_point_at_the_users_line(tmp_path):
    from trl import CPOConfig, DPOConfig, RewardConfig

    folder = str(tmp_path)
    with pytest.warns(Warning) as caught:
        DPOConfig(folder, use_cpu=True, label_smoothing=0.1, loss_type="ipo")
        CPOConfig(folder, use_cpu=True, simpo_gamma=0.1)
        RewardConfig(folder, use_cpu=True, evaluation_strategy="no")
    assert [warning.filename for warning in caught] == [__file__] * 3
