"""Names of other libraries and misspelt ones lead to the right option: on the command line, in files, and in Python."""

import copy
import dataclasses
import importlib
import inspect
import pickle

import pytest
from transformers import HfArgumentParser

import trl
from trl import DPOConfig, GRPOConfig, ModelConfig, ScriptArguments, SFTConfig
from trl.cli.main import COMMANDS, main
from trl.options.groups import OptionGroup
from trl.options.spelling import OF_COMMANDS, OTHER_NAMES, did_you_mean
from trl.scripts.parser import options_of

TRAINING = [name for name, command in COMMANDS.items() if command.kind == "training" and name != "teach"]


@pytest.fixture(scope="module")
def options():
    """The options of each training command, those of `accelerate launch` that the library adds included."""
    parsers = {name: importlib.import_module(COMMANDS[name].module).make_parser() for name in TRAINING}
    return {name: {*options_of(parser), "accelerate_config"} for name, parser in parsers.items()}


def test_every_suggestion_is_an_option_of_a_training_command(options):
    every = set().union(*options.values())
    targets = {meaning.partition(": ")[0] for meaning in OTHER_NAMES.values()} - {""}
    assert targets | OF_COMMANDS <= every, (targets | OF_COMMANDS) - every
    assert len(OTHER_NAMES) > 200 and all(name == name.lower() for name in OTHER_NAMES)


def test_no_name_of_the_table_is_an_option_of_trl_sft(options):
    """Such an entry would never be read; one of them is an option of transformers from 5.23 on."""
    assert set(OTHER_NAMES) & options["sft"] <= {"activation_checkpointing"}


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("model", "model_name_or_path"), ("base_model", "model_name_or_path"), ("cutoff_len", "max_length"),
        ("micro_batch_size", "per_device_train_batch_size"), ("sequence_len", "max_length"), ("adapter", "use_peft"),
        ("finetuning_type", "use_peft"), ("lora_rank", "lora_r"), ("lora_target", "lora_target_modules"),
        ("val_set_size", "test_split_size"), ("num_epochs", "num_train_epochs"), ("sample_packing", "packing"),
        ("gradient_accumulation", "gradient_accumulation_steps"), ("template", "chat_template_path"),
        ("flash_attention", "attn_implementation"), ("optimizer", "optim"), ("dataset", "dataset_name"),
    ],
)  # fmt: skip
def test_names_of_other_libraries(name, option, tmp_path, capsys):
    """One option is suggested, by the command line and by a YAML file with its line."""
    assert main(["sft", f"--{name}", "x"]) == 2
    assert f"Unknown option --{name}. Did you mean --{option}?" in capsys.readouterr().err
    path = tmp_path / "run.yaml"
    path.write_text(f"output_dir: out\n{name}: x\n")
    assert main(["sft", "--config", str(path)]) == 2
    assert f"{path}, line 2: unknown option `{name}`. Did you mean {option}?" in capsys.readouterr().err


def test_a_name_without_an_option_says_what_takes_its_place(capsys):
    assert main(["sft", "--stage", "sft"]) == 2
    assert "Unknown option --stage. The command names the method: trl sft" in capsys.readouterr().err


# --- configs in Python


@pytest.mark.parametrize(
    ("config", "name", "hint"),
    [
        (SFTConfig, "learning_rat", "Did you mean learning_rate?"),
        (SFTConfig, "cutoff_len", "Did you mean max_length?"),
        (SFTConfig, "base_model", "model_name_or_path is an option of commands: in Python a field of "),
        (SFTConfig, "lora_r", "lora_r is an option of commands: in Python a field of ModelConfig, or"),
        (SFTConfig, "dataset", "dataset_name is an option of commands"),
        (SFTConfig, "stage", "The command names the method"),
        (GRPOConfig, "kl_coef", "Did you mean beta?"),
        (ModelConfig, "lora_rank", "Did you mean lora_r? (with use_peft true.)"),
        (ScriptArguments, "dataset_nam", "Did you mean dataset_name?"),
    ],
)
def test_a_misspelt_keyword_of_a_config(config, name, hint):
    with pytest.raises(TypeError) as error:
        config(**{name: 1})
    message = str(error.value)
    assert f"{config.__name__} got an unexpected keyword argument {name!r}. {hint}" in message


@pytest.mark.parametrize(
    "trainer", ["GRPOTrainer", "OnlineDPOTrainer", "NashMDTrainer", "XPOTrainer", "DistillationTrainer", "DDPOTrainer"]
)
def test_a_misspelt_keyword_of_a_trainer_names_the_public_class(trainer):
    with pytest.raises(TypeError, match=f"^{trainer} got an unexpected keyword argument 'proces_class'"):
        getattr(trl, trainer)(proces_class=1)


def test_all_misspelt_keywords_are_reported():
    with pytest.raises(TypeError, match=r"learning_rat.*learning_rate\?\n.*seeed.*seed\?"):
        SFTConfig(learning_rat=1e-5, seeed=1)


def configs():
    """Every config of a training command."""
    for name in TRAINING:
        yield from (kind for kind in importlib.import_module(COMMANDS[name].module).make_parser().dataclass_types)


def test_every_class_of_options_has_the_check():
    for kind in dict.fromkeys(configs()):
        assert issubclass(kind, OptionGroup), kind
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'outptu'"):
            kind(outptu=1)


def test_configs_remain_dataclasses(tmp_path):
    args = SFTConfig(str(tmp_path), use_cpu=True, max_length=7)
    for again in (
        pickle.loads(pickle.dumps(args)),
        copy.copy(args),
        copy.deepcopy(args),
        dataclasses.replace(args),
    ):
        assert again.max_length == 7 and again.output_dir == str(tmp_path)
    (parsed,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(["--output_dir", "x", "--use_cpu", "true"])
    assert parsed.output_dir == "x"
    assert "learning_rate" in inspect.signature(SFTConfig).parameters


def test_subclasses_of_programs(tmp_path):
    @dataclasses.dataclass
    class Fields(DPOConfig):
        mine: int = 3
        derived: dataclasses.InitVar[int] = 0

        def __post_init__(self, derived):
            super().__post_init__()
            self.mine += derived

    assert Fields(str(tmp_path), use_cpu=True, mine=4, derived=2).mine == 6
    with pytest.raises(TypeError, match="Did you mean mine"):
        Fields(str(tmp_path), min=4)

    class Constructor(SFTConfig):
        def __init__(self, folder, *, size, **options):
            super().__init__(folder, **options)
            self.size = size

    args = Constructor(str(tmp_path), size=2, use_cpu=True)
    assert args.size == 2 and pickle.loads(pickle.dumps(args.to_dict()))["output_dir"] == str(tmp_path)


def test_numbers_and_words_that_do_not_fit_come_before_anything_is_loaded(tmp_path):
    given = {"output_dir": str(tmp_path), "use_cpu": True}
    with pytest.raises(ValueError, match=r"got 'adamw8bit'\. Did you mean adamw_8bit\?"):
        SFTConfig(**given, optim="adamw8bit")
    with pytest.raises(
        ValueError, match=r"load_best_model_at_end needs .* got eval_strategy='no', save_strategy='steps'"
    ):
        DPOConfig(**given, load_best_model_at_end=True)
    SFTConfig(**given, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    SFTConfig(**given, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="best")


def test_the_nearest_known_option_where_the_table_has_none_of_the_command():
    assert did_you_mean("epochs", ["num_train_epochs"]) == " Did you mean num_train_epochs?"
    assert did_you_mean("cutoff_len", ["port"]) == ""


def test_a_misspelt_optimiser_is_answered_without_the_list_of_all(capsys):
    assert main(["sft", "--optim", "adamw8bit"]) == 2
    assert "invalid choice: 'adamw8bit' (of " in (said := capsys.readouterr().err) and len(said) < 300
    assert "Did you mean adamw_8bit?" in said


def test_early_stopping_has_a_way():
    advice = did_you_mean("early_stopping_patience", ["output_dir", "eval_steps"], prefix="--")
    assert "EarlyStoppingCallback" in advice
