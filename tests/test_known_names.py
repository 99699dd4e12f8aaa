"""Names that older programs import, at the paths that they import: each does its work. Those with a module of their own are tested
there."""

import importlib
import inspect
import json
import logging
import math
import os
import re
import shlex
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from torch import nn
from transformers import GenerationConfig, TrainerControl, TrainerState, TrainingArguments

from tests.tiny import tiny_classifier, tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer import kto_runs


class Fixed(nn.Module):
    """Logits that do not depend on the input, as `(logits,)`."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, ids):
        return (self.logits.expand(*ids.shape, -1),)


# --- trl.core ---------------------------------------------------------------------------------------------------------


def test_respond_to_batch():
    """The loop of two READMEs: as many tokens as asked for, from the distribution that is left of the model's."""
    from trl.core import respond_to_batch

    torch.manual_seed(0)
    found = respond_to_batch(Fixed([0.0, math.log(3), -1e9]), torch.zeros(200, 2, dtype=torch.int64), txt_len=5)
    assert found.shape == (200, 5) and set(found.unique().tolist()) == {0, 1}
    assert (found == 1).double().mean().item() == pytest.approx(0.75, abs=0.05)  # of 1,000 draws: 3.7 deviations
    assert (respond_to_batch(Fixed([0.0, 1.0, 0.5]), torch.zeros(3, 1, dtype=torch.int64), top_k=1) == 1).all()


def test_respond_to_batch_of_a_model_with_a_value_head():
    from trl import AutoModelForCausalLMWithValueHead
    from trl.core import respond_to_batch

    model, queries = tiny_model("llama"), torch.tensor([[5, 6], [7, 8]])
    found = respond_to_batch(AutoModelForCausalLMWithValueHead(model), queries, txt_len=3, top_k=1)
    greedy = GenerationConfig(do_sample=False, max_new_tokens=3, pad_token_id=0)
    expected = model.generate(input_ids=queries, attention_mask=torch.ones_like(queries), generation_config=greedy)
    assert torch.equal(found, expected[:, 2:])


def test_filtered_logits():
    from trl.core import top_k_top_p_filtering

    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert top_k_top_p_filtering(logits, top_p=0.6).isinf().tolist() == [[True, True, False, False]]
    assert top_k_top_p_filtering(logits, top_p=0.1, min_tokens_to_keep=2).isinf().sum() == 2
    assert top_k_top_p_filtering(logits, top_k=1, filter_value=-5.0)[0, :3].tolist() == [-5.0] * 3
    assert torch.equal(top_k_top_p_filtering(logits), logits)


def test_texts_as_a_batch():
    from trl.core import build_bert_batch_from_txt, listify_batch, pad_to_size

    tokenizer = tiny_tokenizer()
    ids, mask = build_bert_batch_from_txt(["one", "one two three"], tokenizer, "cpu")
    assert ids.shape == mask.shape and mask.sum(dim=1).tolist() == [len(tokenizer(t).input_ids) for t in ("one", "one two three")]  # fmt: skip
    assert (ids[mask == 0] == 0).all() and tokenizer.decode(ids[1]) == "one two three"
    assert [row.tolist() for row in listify_batch(torch.eye(2))] == [[1, 0], [0, 1]]
    assert pad_to_size(torch.tensor([[1]]), 3).tolist() == [[1, 50256, 50256]]


def test_dicts_of_statistics():
    from trl.core import add_suffix, average_torch_dicts, convert_to_scalar

    assert add_suffix({"a": 1}, "_x") == {"a_x": 1}
    assert average_torch_dicts([{"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)}])["a"] == 1.5
    found = convert_to_scalar({"a": torch.tensor([2.0]), "b": torch.ones(2), "c": "text"})
    assert found["a"] == 2.0 and isinstance(found["b"], torch.Tensor) and found["c"] == "text"


def test_noise_of_several_generators():
    from trl.core import randn_tensor

    def generators():
        return [torch.Generator().manual_seed(seed) for seed in (1, 2)]

    both = randn_tensor((2, 3), generators(), device="cpu", dtype=torch.float64)
    each = [torch.randn(3, generator=generator, dtype=torch.float64) for generator in generators()]
    assert torch.equal(both, torch.stack(each))


# --- packages and parsers ---------------------------------------------------------------------------------------------


def test_packages():
    from trl import import_utils

    assert import_utils.is_peft_available() and import_utils.is_rich_available()
    assert not import_utils.is_unsloth_available() and not import_utils.is_liger_kernel_available()
    assert import_utils.is_transformers_greater_than("4.57") and import_utils.is_torch_greater_2_0()
    assert not import_utils.is_transformers_greater_than("99.0") and import_utils.is_accelerate_greater_20_0()
    assert issubclass(import_utils.OptionalDependencyNotAvailable, BaseException)


def test_warnings_are_suppressed():
    from trl.experimental import TRLExperimentalWarning
    from trl.import_utils import suppress_experimental_warning

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with suppress_experimental_warning():
            warnings.warn("moving", TRLExperimentalWarning, stacklevel=1)
        warnings.warn("moving", TRLExperimentalWarning, stacklevel=1)
    assert [each.category for each in seen] == [TRLExperimentalWarning]


def test_a_yaml_file_as_arguments(tmp_path, monkeypatch):
    """As `trl.commands.cli_utils` of 0.8-0.11."""
    from trl.commands.cli_utils import SFTScriptArguments, TrlParser, YamlConfigParser

    monkeypatch.setenv("TRL_TEST_NAME", "before")
    path = tmp_path / "config.yaml"
    path.write_text("dataset_name: 'a b'\nenv: {TRL_TEST_NAME: after}\ndataset_train_split: train\n")
    config = YamlConfigParser().parse_and_set_env(str(path))
    assert config == {"dataset_name": "a b", "dataset_train_split": "train"}
    assert os.environ["TRL_TEST_NAME"] == "after"
    words = YamlConfigParser().to_string({**config, "column_mapping": ["a=b", "c=d"], "dataset_config": None})
    (found,) = TrlParser(SFTScriptArguments).parse_args_and_config(shlex.split(words))
    assert found.dataset_name == "a b" and found.column_mapping == ["a=b", "c=d"]


@pytest.mark.parametrize(("text", "expected"), [("yes", True), ("0", False), ("Off", False)])
def test_strtobool(text, expected):
    from trl.env_utils import strtobool

    assert bool(strtobool(text)) is expected


# --- collators, losses, templates -------------------------------------------------------------------------------------


def test_pairs_of_dpo_are_padded():
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    rows = [
        {"prompt_input_ids": [1, 2], "chosen_input_ids": [3], "rejected_input_ids": [4, 5], "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0},
        {"prompt_input_ids": [6], "chosen_input_ids": [7, 8, 9], "rejected_input_ids": [4], "ref_chosen_logps": -3.0, "ref_rejected_logps": -4.0},
    ]  # fmt: skip
    batch = DataCollatorForPreference(pad_token_id=0)(rows)
    assert batch["prompt_input_ids"].tolist() == [[1, 2], [0, 6]]
    assert batch["prompt_attention_mask"].tolist() == [[1, 1], [0, 1]]
    assert batch["chosen_input_ids"].tolist() == [[3, 0, 0], [7, 8, 9]]
    assert batch["rejected_attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["ref_rejected_logps"].tolist() == [-2.0, -4.0]
    images = [{**row, "pixel_values": torch.full((size, 2), 1.0)} for size, row in enumerate(rows, start=1)]
    assert DataCollatorForPreference(0)(images)["pixel_values"].shape == (2, 2, 2)


def test_pairs_of_rewards_are_padded_and_read_back():
    """All chosen first; the trainer reads such batches as the pairs that they are."""
    from trl.collators.reward import as_reward_batch
    from trl.trainer.reward_trainer import DataCollatorForPreference

    rows = [
        {"chosen_input_ids": [1, 2], "rejected_input_ids": [3], "margin": 0.5},
        {"chosen_input_ids": [4], "rejected_input_ids": [5, 6], "margin": 1.0},
    ]
    batch = DataCollatorForPreference(0, pad_to_multiple_of=3)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 0], [4, 0, 0], [3, 0, 0], [5, 6, 0]]
    assert batch["attention_mask"].sum(dim=1).tolist() == [2, 1, 1, 2] and batch["margin"].tolist() == [
        0.5,
        1.0,
    ]
    read = as_reward_batch(batch, prefix_sharing=False)
    assert read["input_ids"][:, 0].tolist() == [1, 3, 4, 5] and read["rows"].tolist() == [0, 1]
    assert read["attention_mask"].sum(dim=1).tolist() == [2, 1, 1, 2]


def test_dft_loss():
    from trl.trainer.sft_trainer import dft_loss

    logits = torch.log(torch.tensor([[[0.5, 0.5], [0.25, 0.75], [0.1, 0.9]]]))
    labels = torch.tensor([[0, 1, -100]])  # one token is predicted and trained: probability 0.5
    expected = -0.5 * math.log(0.5)
    assert dft_loss(SimpleNamespace(logits=logits), labels).item() == pytest.approx(expected, rel=1e-6)
    assert dft_loss(SimpleNamespace(logits=logits), labels, 4).item() == pytest.approx(expected / 4, rel=1e-6)


def test_accuracy_of_a_plain_tuple():
    from trl.trainer import compute_accuracy

    assert compute_accuracy(([[2.0, 1.0], [0.0, 3.0]], [0, 0])) == {"accuracy": 0.5}


def test_simple_templates():
    from trl.trainer.utils import SIMPLE_CHAT_TEMPLATE, SIMPLE_SFT_CHAT_TEMPLATE

    tokenizer = tiny_tokenizer()
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    tokenizer.chat_template = SIMPLE_CHAT_TEMPLATE
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "User: Hi\n\nAssistant: Ho\n\nAssistant:"
    tokenizer.chat_template = SIMPLE_SFT_CHAT_TEMPLATE
    assert tokenizer.apply_chat_template(chat, tokenize=False) == f" Hi Ho{tokenizer.eos_token}"


def test_the_template_of_qwen3():
    """Earlier turns lose their reasoning, turns behind the last question keep theirs, only the last gets an empty block."""
    from trl.chat_template_utils import qwen3_chat_template, qwen3_schema

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    call = {"function": {"name": "look", "arguments": {"at": "sky"}}}
    chat = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n1"},
        {"role": "user", "content": "Sky?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "Blue."},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nSky?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nblue\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nBlue.<|im_end|>\n"
    )
    assert set(qwen3_schema["fields"]) == {"reasoning_content", "tool_calls", "content"}


def test_protected_tokens_stay():
    from trl.trainer.utils import truncate_with_protected_tokens

    assert truncate_with_protected_tokens([9, 1, 9, 2, 3], 3, [9, 8]) == [9, 9, 3]
    assert truncate_with_protected_tokens([1, 2], 5, []) == [1, 2]
    with pytest.raises(ValueError, match="target_length must be at least 2"):
        truncate_with_protected_tokens([9, 1, 8], 1, [9, 8])


# --- models, generation, callbacks ------------------------------------------------------------------------------------


def test_class_attributes_of_value_heads():
    from trl import (
        AutoModelForCausalLMWithValueHead,
        AutoModelForSeq2SeqLMWithValueHead,
        PreTrainedModelWrapper,
    )
    from trl.models import SUPPORTED_ARCHITECTURES

    assert (AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead) == SUPPORTED_ARCHITECTURES
    assert AutoModelForCausalLMWithValueHead.lm_head_namings == ["lm_head", "embed_out"]
    assert "output_projection" in AutoModelForSeq2SeqLMWithValueHead.lm_head_namings
    assert AutoModelForCausalLMWithValueHead.supported_modules == ("v_head",)
    assert PreTrainedModelWrapper.supported_rm_modules == ("score",)
    from peft import LoraConfig, get_peft_model

    kinds = PreTrainedModelWrapper.supported_pretrained_model_architectures
    assert isinstance(tiny_model("llama"), kinds) and isinstance(
        get_peft_model(tiny_model("llama"), LoraConfig()), kinds
    )


def test_policy_and_value_in_one_call():
    from trl.experimental.ppo.ppo_trainer import PolicyAndValueWrapper

    policy, value_model = tiny_model("llama"), tiny_classifier("llama", num_labels=1)
    ids = torch.tensor([[5, 6, 7]])
    output, values = PolicyAndValueWrapper(policy, value_model)(input_ids=ids, output_hidden_states=True)
    assert torch.equal(output.logits, policy(input_ids=ids).logits) and values.shape == (1, 3, 1)
    assert torch.allclose(values[:, -1], value_model(input_ids=ids).logits, rtol=1e-5)


def test_rows_end_with_a_stop_string():
    from trl.environment.base_environment import StringStoppingCriteria

    tokenizer = tiny_tokenizer()
    criteria = StringStoppingCriteria(["two"], tokenizer)

    ids = torch.tensor([tokenizer("two one").input_ids])
    assert criteria(ids, None).tolist() == [False]
    assert criteria(torch.cat([ids, torch.tensor([tokenizer(" two").input_ids])], dim=1), None).tolist() == [True]
    assert criteria.first_call  # and the next call of generate starts anew


def test_loading_reports_are_dropped(caplog):
    from trl.trainer.reward_trainer import suppress_from_pretrained_warning

    logger = logging.getLogger("some.loader")
    with caplog.at_level("WARNING"), suppress_from_pretrained_warning(logger):
        logger.warning("score.weight MISSING: newly initialized")
        logger.warning("something else")
    logger.warning("newly initialized again")
    assert [record.getMessage() for record in caplog.records] == ["something else", "newly initialized again"]


def test_padding_is_stripped():
    from trl.trainer.utils import decode_and_strip_padding

    tokenizer = tiny_tokenizer()
    ids = tokenizer("one two").input_ids
    assert decode_and_strip_padding(torch.tensor([[*ids, tokenizer.pad_token_id]]), tokenizer) == ["one two"]


def test_adapters_are_saved_by_the_callback(tmp_path):
    from peft import LoraConfig, get_peft_model

    from trl.trainer.utils import PeftSavingCallback

    args, state = TrainingArguments(str(tmp_path), use_cpu=True), TrainerState(global_step=7)
    model = get_peft_model(tiny_model("llama"), LoraConfig())
    PeftSavingCallback().on_save(args, state, TrainerControl(), model=model)
    assert json.loads((tmp_path / "checkpoint-7" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    args.async_save, state.global_step = True, 8  # the trainer writes it after this event
    PeftSavingCallback().on_save(args, state, TrainerControl(), model=model)
    assert not (tmp_path / "checkpoint-8").exists()


def test_callbacks_are_given_the_reference():
    from transformers import TrainerCallback

    from trl.experimental.bema_for_ref_model.callback import CallbackHandlerWithRefModel

    class Keeps(TrainerCallback):
        def on_step_end(self, args, state, control, ref_model=None, **kwargs):
            self.ref_model = ref_model

    keeps, reference = Keeps(), object()
    handler = CallbackHandlerWithRefModel([keeps], None, reference, None, None, None)
    handler.on_step_end(None, TrainerState(), TrainerControl())
    assert keeps.ref_model is reference


def test_tags_join_those_that_are_there():
    from trl.trainer.utils import trl_sanitze_kwargs_for_tagging

    assert trl_sanitze_kwargs_for_tagging(None, ["trl"], {"tags": "mine"}) == {"tags": ["mine", "trl"]}
    assert trl_sanitze_kwargs_for_tagging(None, ["trl"], {}) == {"tags": ["trl"]}
    assert trl_sanitze_kwargs_for_tagging(None, ["trl"]) is None


def test_random_judges():
    from trl.trainer.judges import RandomPairwiseJudge, RandomRankJudge

    completions = [["a", "b"], ["c", "d"]]
    assert all(verdict in (0, 1) for verdict in RandomPairwiseJudge().judge(["p", "q"], completions))
    assert all(sorted(ranks) == [0, 1] for ranks in RandomRankJudge().judge(["p", "q"], completions))


def test_parts_of_the_server():
    from trl.scripts.vllm_serve import ScriptArguments, chunk_list, get_open_port, sanitize_logprob

    assert ScriptArguments(model="m").port == 8000
    with pytest.raises(ValueError, match=r"data_parallel_size must be a whole number in \[1, 1\], got 2"):
        ScriptArguments(model="m", data_parallel_size=2)
    assert chunk_list([1, 2, 3], 4) == [[1], [2], [3], []]
    assert sanitize_logprob(SimpleNamespace(logprob=-1.0)) == -1.0
    assert sanitize_logprob(SimpleNamespace(logprob=math.nan)) is None
    assert 0 < get_open_port() < 65536


def test_a_worker_runs_the_commands_of_its_connection(monkeypatch):
    """The target of a server's process: ready, calls with answers, calls without, the end; weights come by the older extension."""
    from multiprocessing import Pipe
    from threading import Thread
    from types import ModuleType

    from trl.scripts.vllm_serve import ScriptArguments, llm_worker

    calls = []

    class LLM:
        def __init__(self, **settings):
            calls.append(settings)

        def generate(self, prompts, *, n=1):
            return [prompt.upper() for prompt in prompts] * n

        def collective_rpc(self, method):
            calls.append(method)

    package = ModuleType("vllm")
    package.LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    for name in ("RANK", "RANK_LOCAL", "SIZE", "MASTER_PORT"):
        monkeypatch.setenv(f"VLLM_DP_{name}", "")  # put back afterwards
    ours, theirs = Pipe()
    thread = Thread(target=llm_worker, args=(ScriptArguments(model="m", max_model_len=32), 0, 4711, theirs))
    thread.start()
    assert ours.recv() == {"status": "ready"}
    assert (os.environ["VLLM_DP_SIZE"], os.environ["VLLM_DP_MASTER_PORT"]) == ("1", "4711")
    ours.send({"type": "fire_and_forget", "method": "collective_rpc", "args": ("wake",)})
    ours.send({"type": "call", "method": "generate", "kwargs": {"prompts": ["a", "b"], "n": 2}})
    assert ours.recv() == ["A", "B", "A", "B"]
    ours.send({"type": "shutdown"})
    thread.join(10)
    settings, *later = calls
    assert not thread.is_alive() and later == ["wake", "close_communicator"]
    assert (settings["model"], settings["max_model_len"]) == ("m", 32) and "port" not in settings
    assert settings["worker_extension_cls"].endswith("WeightSyncWorkerExtension")


@pytest.mark.parametrize("method", ["ppo", "ddpo", "alignprop"])
def test_templates_of_cards(method):
    template = importlib.import_module(f"trl.trainer.{method}_trainer").MODEL_CARD_TEMPLATE
    card = ModelCard(template.format(model_name="My model", model_id="me/mine"))
    assert card.data.tags == ["trl", method] and "# My model" in card.text and '"me/mine"' in card.text
    assert re.search(r"huggingface.co/papers/\d{4}\.\d{5}\)", card.text) and "{" not in card.text


def test_checkpoints_of_bco_have_the_running_mean(tmp_path):
    from trl.experimental.bco.bco_trainer import RUNNING_NAME, RunningMoments
    from trl.trainer import kto_trainer

    assert (RUNNING_NAME, kto_trainer.RUNNING_NAME) == ("running.json", "running.pt")
    trainer = kto_runs.make_bco(str(tmp_path), save_strategy="steps", save_steps=1, max_steps=1)
    trainer.train()
    moments = RunningMoments.load_from_json(None, str(tmp_path / "checkpoint-1" / RUNNING_NAME))
    assert moments.mean == trainer.method.mean_reward.value and moments.count == trainer.method.mean_reward.count > 1


def test_ready_made_rewards_of_the_scripts():
    from trl.rewards import think_format_reward
    from trl.scripts import grpo, rloo

    assert grpo.reward_funcs_registry["think_format_reward"] is think_format_reward
    assert set(rloo.reward_funcs_registry) == {
        "accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment",
    }  # fmt: skip
    (punished,) = grpo.reward_funcs_registry["get_soft_overlong_punishment"](completion_ids=[[0] * 2000])
    assert punished == -1.0


# --- experimental, configs and errors ---------------------------------------------------------------------------------


def test_a_replay_buffer():
    from trl.experimental.grpo_with_replay_buffer import ReplayBuffer

    buffer = ReplayBuffer(max_size=2)
    assert buffer.sample(3) == []
    buffer.add([0.5, 1.5], [{"id": 0}, {"id": 1}])
    buffer.add([0.1, 0.5], [{"id": 2}, {"id": 3}])
    assert [entry["id"] for _, entry in buffer.heap] == [1, 0]
    torch.manual_seed(0)
    drawn = [entry["id"] for entry in buffer.sample(1000)]
    assert drawn.count(1) / 1000 == pytest.approx(0.75, abs=0.05)  # 1.5 of 2; 3.7 deviations


@pytest.mark.parametrize("name", ["reward_model", "value_model", "processing_class", "args"])
def test_the_step_level_trainer_names_the_one_over_data_sets(name):
    from trl import PPOTrainer

    with pytest.raises(TypeError, match=rf".*{name}.* use PPOConfig and PPOTrainer of trl\.experimental\.ppo"):
        PPOTrainer(**{name: None})
    with pytest.raises(TypeError, match=r"arguments .*modell"):
        PPOTrainer(modell=None)


@pytest.mark.parametrize(
    "given", [{"reward_model_path": "m"}, {"missing_eos_penalty": 1.0}, {"kl_coef": 0.1}, {"output_dir": "x"}]
)
def test_the_step_level_config_names_the_one_over_data_sets(given):
    from trl import PPOConfig

    with pytest.raises(TypeError, match=rf"got {next(iter(given))}, .* trl\.experimental\.ppo"):
        PPOConfig(**given)


def test_ppo_over_data_sets_takes_the_names_of_0_11(tmp_path):
    """`PPOv2Trainer(config=, tokenizer=, policy=, ref_policy=)` trains as today's names do."""
    from tests.experimental import ppo_runs
    from trl import PPOv2Config, PPOv2Trainer

    words = ppo_runs.tokenizer()
    words.eos_token = ppo_runs.END
    models = {
        "ref_policy": tiny_model("gpt2", dtype=torch.float64),
        "reward_model": None,
        "value_model": tiny_classifier("gpt2", dtype=torch.float64, num_labels=1, seed=3),
    }
    config = PPOv2Config(str(tmp_path), **{**ppo_runs.SETTINGS, "max_steps": 1})
    keep = ppo_runs.KeepGradients()
    with pytest.warns(FutureWarning, match="policy -> the argument model; ref_policy -> the argument ref_model"):
        trainer = PPOv2Trainer(
            config=config, tokenizer=words, policy=tiny_model("gpt2", dtype=torch.float64), **models,
            train_dataset=ppo_runs.prompts(), reward_funcs=ppo_runs.even_tokens, callbacks=[keep],
        )  # fmt: skip
    trainer.train()
    _, expected = ppo_runs.run(max_steps=1, ref_model=tiny_model("gpt2", dtype=torch.float64))
    for name, gradient in expected.steps[0].items():
        torch.testing.assert_close(keep.steps[0][name], gradient, rtol=0, atol=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'ref_polcy'"):
        PPOv2Trainer(config, ref_polcy=None)


@pytest.mark.parametrize("name", ["gfpo.GFPOTrainer", "papo.PAPOTrainer"])
def test_signatures_are_written_out(name):
    module, _, name = name.rpartition(".")
    trainer = getattr(importlib.import_module(f"trl.experimental.{module}"), name)
    expected = ["model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"]
    expected += ["reward_processing_classes", *(["group_filter_func"] if module == "gfpo" else [])]
    expected += ["callbacks", "optimizers", "peft_config"]
    assert list(inspect.signature(trainer).parameters)[: len(expected)] == expected


def test_papo_has_the_defaults_of_0_26(tmp_path):
    from trl.experimental.papo import PAPOConfig

    assert PAPOConfig(str(tmp_path)).loss_type == "dapo"
    assert PAPOConfig(str(tmp_path), mask_type="grid").mask_type == "grid"


def test_a_reward_model_by_name_comes_before_the_functions():
    from trl import ModelConfig
    from trl.rewards import think_format_reward
    from trl.scripts import training
    from trl.scripts.arguments import GRPOScriptArguments

    def rewards(**given):
        return training.rewards(GRPOScriptArguments("data", **given), ModelConfig())["reward_funcs"]

    assert rewards(reward_model_name_or_path="my/model") == ["my/model"]
    both = rewards(reward_model_name_or_path="my/model", reward_funcs=["think_format_reward"])
    assert both == ["my/model", think_format_reward]
    with pytest.raises(ValueError, match="reward_funcs is missing"):
        rewards()
