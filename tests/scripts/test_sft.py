import json

import pytest
import torch

from tests.models.words import word_tokenizer
from tests.tiny import tiny_model
from trl.options.model import ModelConfig
from trl.scripts import sft, training
from trl.scripts.arguments import SFTScriptArguments
from trl.scripts.model_loading import model_init_kwargs
from trl.scripts.parser import TrlParser
from trl.scripts.running import run_script
from trl.trainer.sft_config import SFTConfig


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    word_tokenizer(eos_token="</s>", pad_token="<pad>", bos_token="<s>").save_pretrained(path)
    return str(path)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"question": "the cat ", "answer": "sat on the mat"}) + "\n"
    path.write_text(row * 8)
    return str(path)


@pytest.fixture
def run(tmp_path, model_path, rows):
    def command(*line):
        fixed = [
            *(
                "--model_name_or_path",
                model_path,
                "--dataset_name",
                rows,
                "--output_dir",
                str(tmp_path / "out"),
            ),
            *(
                "--use_cpu",
                "--report_to",
                "none",
                "--max_steps",
                "4",
                "--save_steps",
                "2",
                "--disable_tqdm",
                "true",
            ),
            *(
                "--column_mapping",
                "question=prompt",
                "answer=completion",
                "--per_device_train_batch_size",
                "2",
            ),
            *("--learning_rate", "0.01", "--logging_steps", "1"),
        ]
        return run_script(sft.make_parser(), sft.main, [*fixed, *line])

    return command


def test_the_whole_command(run, tmp_path, capsys):
    assert run("--eval_strategy", "steps", "--dataset_test_split", "train[:2]") == 0
    out = capsys.readouterr().out
    assert f"Model saved in {tmp_path / 'out'}" in out
    assert "Last training log (step 4): loss " in out and "Last evaluation (step 4): eval_loss " in out
    assert "Whole run (step 4): train_loss " in out
    assert "To resume: trl sft" in out
    assert (tmp_path / "out" / "model.safetensors").is_file()
    history = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())[
        "log_history"
    ]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_going_on_from_the_newest_checkpoint(run, tmp_path, capsys):
    assert run("--resume_from_checkpoint", "true") == 0
    assert "starting from the beginning" in capsys.readouterr().out
    weights = tmp_path / "out" / "model.safetensors"
    whole = weights.read_bytes()
    for file in (tmp_path / "out" / "checkpoint-4").iterdir():
        if file.name == "trainer_state.json":
            file.unlink()  # as if the run had stopped while it wrote this checkpoint
    weights.unlink()
    assert run("--resume_from_checkpoint", "true") == 0
    assert weights.read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--eval_strategy", "epoch"], "--eval_strategy no"),
        (["--column_mapping", "questoin=prompt"], "`questoin`, which is no column of split 'train'"),
        (["--dataset_name", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--resume_from_checkpoint", "nowhere"], "resume_from_checkpoint='nowhere' needs a checkpoint"),
        (["--packing", "--max_length", "0"], "max_length must be a whole number >= 1"),
        (["--model_init_kwargs", "{oops"], "model_init_kwargs must be a JSON object"),
        (
            ["--gradient_accumulation_steps", "0"],
            "gradient_accumulation_steps must be a whole number >= 1, got 0",
        ),
        (["--report_to", "neptune"], "report_to='neptune' needs a package that is not installed"),
        (["--push_to_hub", "true"], "HF_HUB_OFFLINE forbids"),
        (["--output_dir", __file__], "test_sft.py' is a file. Name another place."),
        (["--optim", "galore_adamw"], "install `galore_torch`"),
    ],
)
def test_bad_input_is_one_message_and_status_2(run, capsys, monkeypatch, line, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run(*line) == 2
    err = capsys.readouterr().err
    assert "trl sft: error: " in err and message in err and "Traceback" not in err


def test_a_model_is_needed(capsys, rows):
    assert run_script(sft.make_parser(), sft.main, ["--dataset_name", rows, "--use_cpu"]) == 2
    assert "model_name_or_path is missing" in capsys.readouterr().err


def test_the_parser_as_a_subcommand():
    main = TrlParser(prog="main")
    parser = sft.make_parser(main.add_subparsers(parser_class=TrlParser))
    assert isinstance(parser, TrlParser) and "max_length" in parser.options()


def test_reentrant_checkpointing_and_bias_buffers(tmp_path, model_path, rows):
    from trl.data.mixtures import DatasetMixtureConfig

    script_args = SFTScriptArguments(
        rows,
        gradient_checkpointing_use_reentrant=True,
        ignore_bias_buffers=True,
        column_mapping=["question=prompt", "answer=completion"],
    )
    args = SFTConfig(str(tmp_path), use_cpu=True, report_to="none")
    trainer = training.build_trainer(
        "sft", script_args, args, ModelConfig(model_path), DatasetMixtureConfig()
    )
    assert trainer.args.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert trainer.model._ddp_params_and_buffers_to_ignore == []
    trainer.model.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    training.ignore_boolean_buffers(trainer.model)
    assert trainer.model._ddp_params_and_buffers_to_ignore == ["mask"]


def test_model_init_kwargs():
    plain = model_init_kwargs(ModelConfig("m", dtype="float32", attn_implementation="eager"))
    assert plain == {
        "revision": "main",
        "trust_remote_code": False,
        "attn_implementation": "eager",
        "dtype": "float32",
    }
    assert model_init_kwargs(ModelConfig("m", dtype="float32"), {"dtype": "bfloat16"})["dtype"] == "bfloat16"


def test_model_init_kwargs_of_a_quantised_model():
    pytest.importorskip("bitsandbytes")
    arguments = model_init_kwargs(ModelConfig("m", load_in_4bit=True))
    assert arguments["quantization_config"].load_in_4bit is True
    assert "device_map" in arguments
