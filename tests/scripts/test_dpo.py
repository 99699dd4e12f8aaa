"""`trl dpo` on a tiny model: from files to a saved model, with dialogues, adapters and references."""

import json

import pytest

from tests.tiny import tiny_model
from trl.scripts import dpo
from trl.scripts.parser import TrlParser
from trl.scripts.running import run_script

TURN = "\n\nHuman: And then?\n\nAssistant:"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    answers = [(" Look up.", " Next."), (" Seven apples.", " And 12 pears are left.")]
    lines = [json.dumps({"chosen": TURN + good, "rejected": TURN + bad}) for good, bad in answers]
    path.write_text("\n".join(lines * 4))
    return str(path)


@pytest.fixture
def run(tmp_path, model_path, rows):
    def command(*line, data=rows):
        fixed = (
            f"--model_name_or_path {model_path} --dataset_name {data} --output_dir {tmp_path / 'out'} --use_cpu "
            "--report_to none --max_steps 4 --save_steps 2 --disable_tqdm true --per_device_train_batch_size 4 "
            "--learning_rate 0.01 --logging_steps 1 --dialogue_marker Assistant:"
        )
        return run_script(dpo.make_parser(), dpo.main, [*fixed.split(), *line])

    return command


def history(tmp_path):
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    return state["log_history"]


def test_the_whole_command(run, tmp_path, capsys):
    assert run("--eval_strategy", "steps", "--dataset_test_split", "train[:2]", "--eval_steps", "4") == 0
    out = capsys.readouterr().out
    assert f"Model saved in {tmp_path / 'out'}" in out
    assert "eval_rewards/accuracies 1" in out
    assert "To resume: trl dpo" in out
    assert (tmp_path / "out" / "model.safetensors").is_file()
    losses = [entry["loss"] for entry in history(tmp_path) if "loss" in entry]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < 0.5 * losses[0]


def test_going_on_from_the_newest_checkpoint(run, tmp_path):
    assert run() == 0
    weights = tmp_path / "out" / "model.safetensors"
    whole = weights.read_bytes()
    (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").unlink()
    weights.unlink()
    assert run("--resume_from_checkpoint", "true") == 0
    assert weights.read_bytes() == whole


def test_an_adapter(run, tmp_path):
    assert run("--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_r", "2") == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_reference_of_its_own(run, tmp_path):
    other = tmp_path / "other"
    tiny_model("llama", vocab_size=400, seed=3).save_pretrained(other)
    assert (
        run(
            "--ref_model_name_or_path",
            str(other),
            "--loss_type",
            "sigmoid",
            "sft",
            "--loss_weights",
            "1",
            "0.2",
        )
        == 0
    )
    first = history(tmp_path)[0]
    assert first["rewards/chosen"] != 0 and first["nll_loss"] > 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--dialogue_marker", "Bot:"], "share no 'Bot:'"),
        (["--label_smoothing", "0.7"], "label_smoothing must be in [0, 0.5)"),
        (["--loss_type", "dpo"], "unknown loss_type 'dpo'"),
        (["--ref_model_name_or_path", "/nowhere"], "/nowhere"),
        (["--ref_adapter_name", "reference"], "ref_adapter_name"),
        (["--eval_strategy", "epoch"], "--eval_strategy no"),
    ],
)
def test_bad_input_is_one_message_and_status_2(run, capsys, line, message):
    assert run(*line) == 2
    err = capsys.readouterr().err
    assert "trl dpo: error: " in err and message in err and "Traceback" not in err


def test_the_parser_as_a_subcommand():
    main = TrlParser(prog="main")
    parser = dpo.make_parser(main.add_subparsers(parser_class=TrlParser))
    assert isinstance(parser, TrlParser) and "dialogue_marker" in parser.options()


def test_a_slice_of_hh_harmless(run, shared, tmp_path):
    file = shared / "data" / "hh_harmless" / "train.jsonl"
    if not file.is_file():
        pytest.skip(f"{file} is not present on this machine")
    lines = "--max_length 128 --max_prompt_length 64 --dataset_train_split train[:32] --max_steps 8 --save_steps 4"
    assert run(*lines.split(), data=str(file)) == 0
    state = json.loads((tmp_path / "out" / "checkpoint-8" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 8 and losses[-1] < losses[0]
