"""`trl sft`, `dpo`, `kto` and `reward` and others on a tiny model: from files to a saved model, and errors in one message."""

import importlib
import json
import re
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl.data.sources import DatasetMixtureConfig
from trl.options.model import ModelConfig
from trl.scripts import merge, training
from trl.scripts.arguments import SFTScriptArguments
from trl.scripts.loading import model_init_kwargs
from trl.scripts.running import run_script
from trl.trainer.sft_config import SFTConfig

TURN = "\n\nHuman: And then?\n\nAssistant:"
PAIR = {"prompt": "Q: How many?", "chosen": " Seven apples.", "rejected": " Next."}
# Rows, and options of each command.
COMMANDS = {
    "sft": ([{"question": "Q: How many?", "answer": " Seven apples."}], "--column_mapping question=prompt answer=completion"),
    "dpo": ([{"chosen": TURN + good, "rejected": TURN + bad} for good, bad in ((" Look up.", " Next."), (" It is blue.", " Q"))],
            "--dialogue_marker Assistant:"),
    "kto": ([{"question": "Q: How many?", "answer": text, "good": text == " Seven."} for text in (" Seven.", " Next.")],
            "--column_mapping question=prompt answer=completion good=label"),
    "orpo": ([PAIR], ""),
    "cpo": ([PAIR], "--loss_type simpo --cpo_alpha 0"),
    "bco": ([{"prompt": "Q: How many?", "completion": text, "label": text == " Seven."} for text in (" Seven.", " Next.")], ""),
    "prm": ([{"prompt": "Q: How many?", "completions": [" Seven", " apples."], "labels": [True, False]}], ""),
    "reward": ([{"question": PAIR["prompt"], **PAIR}], "--column_mapping prompt=old question=prompt"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path, model_path):
    def command(name, *line, rows=None):
        own, options = COMMANDS[name]
        data, script = tmp_path / "rows.jsonl", importlib.import_module(f"trl.scripts.{name}")
        data.write_text("".join(json.dumps(row) + "\n" for row in (own * 4 if rows is None else rows)))
        fixed = (
            f"--model_name_or_path {model_path} --dataset_name {data} --output_dir {tmp_path / 'out'} --use_cpu "
            "--report_to none --max_steps 4 --save_steps 2 --disable_tqdm true --per_device_train_batch_size 4 "
            f"--learning_rate 0.01 --logging_steps 1 {'' if rows is not None else options}"
        )
        return run_script(script.make_parser(), script.main, [*fixed.split(), *line])

    return command


def logged(tmp_path):
    return json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_whole_command(run, name, tmp_path, capsys):
    line = "--eval_strategy steps --eval_steps 4 --dataset_test_split train[:4]"
    assert run(name, *line.split()) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    for words in (
        f"Model saved in {tmp_path / 'out'}", "first     best     last\n", "\neval loss ",
        '  model = pipeline("t', f'", "{tmp_path / "out"}")\n', f"To resume: trl {name}",  # no row is a chat
    ):  # fmt: skip
        assert words in out
    assert (tmp_path / "out" / "model.safetensors").is_file()
    losses = [entry["loss"] for entry in logged(tmp_path) if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0]
    if name == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
        assert model.config.num_labels == 1 and re.search(r"eval acc +1.000 +- +1.000", out)


def test_a_model_of_chats_is_used_in_a_chat(run, tmp_path, capsys):
    ask, good, bad = (
        {"role": role, "content": text} for role, text in (("user", "How?"), ("assistant", "So."), ("assistant", "No."))
    )
    assert run("dpo", rows=[{"chosen": [ask, good], "rejected": [ask, bad]}] * 4) == 0
    assert f"\n  trl chat {tmp_path / 'out'}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_going_on_from_the_newest_whole_checkpoint(run, name, tmp_path, capsys):
    assert run(name, "--resume_from_checkpoint", "true") == 0
    assert "starting from the beginning" in capsys.readouterr().out
    weights = tmp_path / "out" / "model.safetensors"
    whole = weights.read_bytes()
    (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").unlink()  # as if stopped while it was written
    weights.unlink()
    assert run(name, "--resume_from_checkpoint", "true") == 0
    assert weights.read_bytes() == whole


@pytest.mark.parametrize(("name", "task"), [("dpo", "CAUSAL_LM"), ("reward", "SEQ_CLS")])
def test_an_adapter(run, name, task, tmp_path):
    assert run(name, "--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_r", "2") == 0
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["task_type"] == task
    assert not (tmp_path / "out" / "model.safetensors").exists()
    if name == "reward":
        weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert torch.cat([w.flatten() for key, w in weights.items() if "score" in key]).any()


def test_an_adapter_of_experts(run, tmp_path, capsys):
    tiny_model("qwen3_moe", vocab_size=400).save_pretrained(tmp_path / "mixture")
    tiny_tokenizer().save_pretrained(tmp_path / "mixture")
    line = f"--model_name_or_path {tmp_path / 'mixture'} --use_peft --lora_target_parameters"
    assert run("sft", *line.split(), "mlp.experts.gate_up_proj", "mlp.experts.down_proj") == 0
    adapter, merged = tmp_path / "out", tmp_path / "merged"
    assert merge.main([str(adapter), "--out", str(merged)]) == 0
    base, mixed = (load_file(folder / "model.safetensors") for folder in (tmp_path / "mixture", merged))
    changed = {name for name, value in base.items() if not torch.equal(value, mixed[name])}
    assert changed and all(".experts." in name for name in changed)
    assert run("sft", *line.split(), "mlp.experts.up_proj") == 2
    assert "'mlp.experts.up_proj', but no parameter of Qwen3MoeForCausalLM" in capsys.readouterr().err


BAD = [
    ("sft", "--eval_strategy epoch", "dataset_test_split: "),
    ("sft", "--column_mapping questoin=prompt", "`questoin`, which is no column of split 'train'"),
    ("sft", "--dataset_name nowhere.jsonl", "nowhere.jsonl"),
    ("sft", "--resume_from_checkpoint nowhere", "resume_from_checkpoint='nowhere'"),
    ("sft", "--report_to neptune", "report_to='neptune'"),
    ("sft", "--push_to_hub true", "HF_HUB_OFFLINE"),
    ("sft", f"--output_dir {__file__}", "is a file"),
    ("sft", "--optim galore_adamw", "galore_torch"),
    ("sft", "--dataset_config main", "rows.jsonl': a file has none. Leave it out."),
    pytest.param(
        "sft",
        "--load_in_4bit true",
        "quantised weights (load_in_4bit, load_in_8bit) are not trained, and there is no adapter.",
        marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra `quantization`"),
    ),
    ("dpo", "--loss_type dpo", "Did you mean sigmoid? (the loss of the paper.)"),
    ("sft", "--learning_rate -1e-4", "learning_rate must be >= 0, got -0.0001."),
    (
        "sft",
        "--per_device_train_batch_size -2",
        "per_device_train_batch_size must be a whole number >= 1, got -2.",
    ),
    ("sft", "--max_steps -1 --num_train_epochs -1", "num_train_epochs must be >= 0, got -1.0."),
    ("sft", "--max_length -5", "max_length must be a whole number >= 1 or None, got -5."),
    ("sft", "--chat_template_path nowhere.jinja", "chat_template_path='nowhere.jinja' is no file"),
    (
        "sft",
        "--load_best_model_at_end true",
        "load_best_model_at_end needs an evaluation for every saved model",
    ),
    (
        "sft",
        "--lora_r 8",
        "lora_r=8 has no effect without adapters: all weights would be trained. Add --use_peft true.",
    ),
    (
        "dpo",
        "--lora_alpha 64 --lora_dropout 0",
        "lora_alpha=64, lora_dropout=0.0 has no effect without adapters",
    ),
    ("dpo", "--dialogue_marker Bot:", "share no 'Bot:'"),
    (
        "sft",
        "--eval_strategy steps --dataset_test_split train --metric_for_best_model acc",
        "The screen's acc is 'mean_token_accuracy'. Set that.",
    ),
    ("dpo", "--ref_model_name_or_path /nowhere", "/nowhere"),
    ("kto", "--column_mapping question=prompt answer=completion answer=label", "answer"),
    ("reward", "--column_mapping chosen=answer", "chosen_input_ids"),
]


def test_an_adapter_is_no_base_of_another_one(run, tmp_path, capsys):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert run("dpo", "--model_name_or_path", str(tmp_path / "adapter"), "--use_peft", "true") == 2
    assert "is an adapter, and use_peft trains another one" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "line", "message"), BAD)
def test_bad_input_is_one_message_and_status_2(run, capsys, monkeypatch, name, line, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run(name, *line.split()) == 2
    err = capsys.readouterr().err
    assert f"trl {name}: error: " in err and message in err and "Traceback" not in err


def test_rows_of_alpaca_name_the_column_mapping(run, capsys):
    rows = [{"instruction": "Add.", "input": "1 2", "output": "3"}]
    assert run("sft", rows=rows) == 2
    said = capsys.readouterr().err
    mapping = "--column_mapping instruction=prompt output=completion"
    assert f"{mapping} (`input` is not read then: append it to the instruction)" in said
    assert run("sft", *mapping.split(), "--dry_run", "true", rows=rows) == 0


def test_reentrant_checkpointing_and_bias_buffers(tmp_path, model_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "Look up."}))
    script_args = SFTScriptArguments(
        str(tmp_path / "rows.jsonl"), gradient_checkpointing_use_reentrant=True, ignore_bias_buffers=True
    )
    args = SFTConfig(str(tmp_path), use_cpu=True, report_to="none")
    trainer, _ = training.build_trainer("sft", script_args, args, ModelConfig(model_path), DatasetMixtureConfig())
    assert trainer.args.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert trainer.model._ddp_params_and_buffers_to_ignore == []


def test_model_init_kwargs():
    plain = model_init_kwargs(ModelConfig("m", dtype="float32", attn_implementation="eager"))
    known = {"revision": "main", "trust_remote_code": False, "attn_implementation": "eager"}
    assert plain == {**known, "dtype": "float32"}
    assert model_init_kwargs(ModelConfig("m", dtype="float32"), {"dtype": "bfloat16"})["dtype"] == "bfloat16"
