"""What the library uses of transformers' private parts is there, as it was when it was written: each part has a test by name.

A new version of transformers that changes one of them fails here first. docs/internals/architecture.md lists them with their use.
"""

import ast
import importlib
import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from trl.options.checks import CHECKPOINTING

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "trl"
ARCHITECTURE = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")

# Methods of Trainer that are overridden or called, and their parameters: all of them.
METHODS = {
    "_get_dataloader": "dataset description batch_size sampler_fn is_training dataloader_key",
    "_get_learning_rate": "",
    "_get_output_dir": "trial",
    "_get_train_sampler": "train_dataset",
    "_init_training_state": "max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
    "_load_best_model": "",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_load_rng_state": "checkpoint",
    "_prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
    "_prepare_inputs": "inputs",
    "_push_from_checkpoint": "checkpoint_folder",
    "_run_epoch": "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval "
    "start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
    "_save": "output_dir state_dict",
    "_save_checkpoint": "model trial",
}
OVERRIDDEN = (  # the others are called
    *("_get_output_dir", "_load_best_model", "_load_from_checkpoint", "_load_optimizer_and_scheduler"),
    *("_load_rng_state", "_save", "_save_checkpoint", "_get_dataloader"),
)
OTHERS_OF_THE_NAME = {"_evaluate"}  # a callback's
# Attributes that Trainer sets.
ATTRIBUTES = (
    *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_signature_columns"),
    *("_initial_global_step", "_initial_num_input_tokens_seen"),
)
# Functions and classes outside the documented interface, and their first parameters.
FUNCTIONS = {
    "core_model_loading.revert_weight_conversion": "model state_dict",
    "hf_argparser.string_to_bool": "v",
    "integrations.sdpa_attention.repeat_kv": "hidden_states n_rep",
    "integrations.sdpa_attention.sdpa_attention_forward": "module query key value attention_mask dropout scaling",
    "masking_utils.AttentionMaskInterface.register": "key value",
    "masking_utils.sdpa_mask": "batch_size q_length kv_length q_offset kv_offset mask_function attention_mask",
    "trainer_jit_checkpoint.JITCheckpointCallback": "",
    "trainer_pt_utils.LengthGroupedSampler": "batch_size dataset lengths model_input_name generator",
    "utils.chat_template_utils.render_jinja_template": "conversations tools documents chat_template "
    "return_assistant_tokens_mask continue_final_message add_generation_prompt",
}


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def changed(name: str) -> str:
    return f"transformers {transformers.__version__} changed {name}. See docs/internals/architecture.md for its use."


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_trainer(name):
    assert hasattr(Trainer, name), changed(f"Trainer.{name}")
    assert parameters(getattr(Trainer, name)) == METHODS[name].split(), changed(f"Trainer.{name}")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_of_trainer(name):
    assert f"self.{name} = " in inspect.getsource(Trainer), changed(f"Trainer.{name}")


@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_function(path):
    module, _, name = path.partition(".")
    value: Any = importlib.import_module(f"transformers.{module}")
    for part in name.split("."):
        value = getattr(value, part, None) or importlib.import_module(f"{value.__name__}.{part}")
    first = FUNCTIONS[path].split()
    assert parameters(value)[: len(first)] == first, changed(path)


def test_the_attention_implementation_is_set_on_the_config():
    config = PretrainedConfig(attn_implementation="eager")
    assert config._attn_implementation == "eager", changed("PretrainedConfig._attn_implementation")
    config._attn_implementation = "sdpa"
    assert config._attn_implementation == "sdpa", changed("PretrainedConfig._attn_implementation")


def test_chat_templates_read_the_clock_of_their_module():
    source = inspect.getsource(transformers.utils.chat_template_utils)
    assert "return datetime.now().strftime(format)" in source, changed("chat_template_utils.datetime")


def test_keys_that_are_not_saved_are_an_attribute_of_the_model():
    assert hasattr(PreTrainedModel, "_keys_to_ignore_on_save"), changed("_keys_to_ignore_on_save")


def test_the_number_of_gpus_is_an_attribute_of_the_arguments(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    args._n_gpu = 1
    assert args.n_gpu == 1, changed("TrainingArguments._n_gpu")


def test_checkpointed_layers_have_a_switch():
    from transformers.modeling_layers import GradientCheckpointingLayer

    assert GradientCheckpointingLayer.gradient_checkpointing is False, changed("GradientCheckpointingLayer")


def test_settings_that_transformers_renames_are_in_our_table():
    """The newest transformers has new names for these alone; what 6 removes would be lost elsewhere."""
    older = {field.name for field in fields(TrainingArguments) if "Deprecated alias" in field.metadata.get("help", "")}
    assert older <= {CHECKPOINTING[0], f"{CHECKPOINTING[0]}_kwargs"}, changed("fields of TrainingArguments")


def test_no_private_part_of_trainer_is_used_that_is_not_listed():
    """At most eight are overridden: each is a place where the next release can break training."""
    theirs = {name for name in vars(Trainer) if name.startswith("_") and not name.startswith("__")}
    used, overridden = set(), set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", None) or getattr(node, "name", None)
            used |= {name} & theirs
            overridden |= {name} & theirs if isinstance(node, ast.FunctionDef) else set()
    assert used - OTHERS_OF_THE_NAME == set(METHODS)
    assert overridden - OTHERS_OF_THE_NAME == set(OVERRIDDEN) and len(OVERRIDDEN) <= 8


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_document_gives_the_reason_of_an_override(name):
    assert f"\n| `{name}` | " in ARCHITECTURE, name


@pytest.mark.parametrize("name", [*METHODS, *ATTRIBUTES, *(path.rpartition(".")[2] for path in FUNCTIONS)])
def test_the_document_lists_it(name):
    assert f"`{name}`" in ARCHITECTURE, name
