"""`trl chat` and `trl merge`: answers equal to `generate`, commands, Ctrl-C in a terminal, adapters merged or not."""

import io
import json
import os
import pty
import select
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.two_processes import end_with
from trl.cli.main import main


def saved(model, path):
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    model = tiny_model("llama", vocab_size=400, max_position_embeddings=100_000, eos_token_id=2)
    return saved(model, tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapter_path(tmp_path_factory, model_path):
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def chat(monkeypatch, capsys, tmp_path):
    """Runs `trl chat` with lines through a pipe; returns what it prints."""

    def run(*line, said, status=0):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(said) + "\n"))
        assert main(["chat", *line]) == status
        out, err = capsys.readouterr()
        return out if status == 0 else err

    return run


def greedy(path, *messages, tokens=8):
    """The model's own greedy answer to a conversation."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=False, return_tensors="pt"
    )
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    return "".join(char for char in text if char in "\n\t" or (char >= " " and char != "\x7f"))


def user(text):
    return {"role": "user", "content": text}


def test_answers_are_those_of_the_model_turn_by_turn(chat, model_path):
    first = greedy(model_path, {"role": "system", "content": "Be brief."}, user("What colour?"))
    out = chat(
        *("--model_name_or_path", model_path, "--do_sample", "false", "--max_new_tokens", "8"),
        *("--system_prompt", "Be brief.", "--device", "cpu"),
        said=["What colour?", "", "clear", "What colour?", "exit", "not read"],
    )
    assert out == f"{first}\n{first}\n"
    second = chat(model_path, "--temperature", "0", "--max_new_tokens", "8", said=["Next.", "Next."])
    one = greedy(model_path, user("Next."))
    two = greedy(model_path, user("Next."), {"role": "assistant", "content": one}, user("Next."))
    assert second == f"{one}\n{two}\n" and one != two


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["nowhere/at/all"], "There is no folder 'nowhere/at/all'"),
        ([], "The model is missing"),
        (["m", "--num_beams", "4"], "num_beams must be"),
        (["m", "--top_p", "0"], "top_p must be in (0, 1]"),
        (
            ["MODEL", "--eos_tokens", "<nothing>"],
            "eos_tokens must be tokens of the tokenizer, got '<nothing>'",
        ),
    ],
)
def test_bad_arguments_are_one_message(chat, model_path, line, message):
    assert message in chat(*[model_path if word == "MODEL" else word for word in line], said=[], status=2)


def test_the_end_tokens_given_end_an_answer(chat, model_path):
    whole = greedy(model_path, user("Q"), tokens=8)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    first = tokenizer(whole)["input_ids"][0]
    out = chat(model_path, "--temperature", "0", "--eos_token_ids", str(first), said=["Q"])
    assert out == tokenizer.decode([first]) + "\n"


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or sys.platform == "win32", reason="needs a terminal")
def test_ctrl_c_ends_the_answer_and_then_the_chat(model_path, tmp_path):
    """In a fork of this process, with a terminal."""
    line = [model_path, "--max_new_tokens", "90000", "--temperature", "0", "--eos_tokens", "<pad>", "--device", "cpu"]
    errors = (tmp_path / "errors").open("w+")
    process, parent = pty.fork()
    if not process:  # everything is imported
        os.dup2(errors.fileno(), 2)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        # A suite in the background of a shell ignores SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["trl", "chat", *line]
        end_with(main)
    seen = ""

    def shown(found, seconds=120):
        nonlocal seen
        while not found(seen) and select.select([parent], [], [], seconds)[0]:
            seen += os.read(parent, 4096).decode(errors="replace")
        return found(seen)

    assert shown(lambda text: "user: " in text), seen
    os.write(parent, b"Is it blue?\n")
    # It streams: the answer of 90,000 tokens is far from its end.
    assert shown(lambda text: len(text.partition("assistant: ")[2]) > 20), seen
    os.kill(process, signal.SIGINT)
    assert shown(lambda text: "user: " in text.partition("(stopped)")[2]), seen
    # readline sleeps on if the signal comes between its prompt and its wait for input. After the line's end none may come: it
    # would end the process.
    for _ in range(60):
        os.kill(process, signal.SIGINT)
        if shown(lambda text: "\n" in text.rpartition("user: ")[2], 2):
            break
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    errors.seek(0)
    assert "Traceback" not in errors.read()
    errors.close()
    os.close(parent)


def test_an_adapter_answers_as_the_merged_model_does(chat, adapter_path, model_path, tmp_path, capsys):
    out = str(tmp_path / "merged")
    assert main(["merge", adapter_path, "--out", out]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Merged model saved in {out}"
    merged = greedy(out, user("And then?"))
    assert merged != greedy(model_path, user("And then?"))
    saved(tiny_model("llama", vocab_size=400), tmp_path / "other")  # the adapter itself has no tokenizer
    tiny_tokenizer().save_pretrained(adapter_path)
    assert chat(adapter_path, "--temperature", "0", "--max_new_tokens", "8", said=["And then?"]) == f"{merged}\n"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_merged_weights_have_the_dtype_of_the_base(tmp_path, dtype):
    base = tiny_model("llama", vocab_size=400, dtype=dtype)
    path = saved(base, tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
    )
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    delta = 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    model.save_pretrained(tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "out")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype == dtype and not (tmp_path / "out" / "adapter_config.json").exists()
    before, after = (each.model.layers[1].self_attn.q_proj.weight.float() for each in (base, merged))
    unit = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(after - before, delta.float().detach(), rtol=unit, atol=unit)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_an_adapter_of_a_reward_model_keeps_its_head(tmp_path):
    path = saved(tiny_model("llama", vocab_size=400), tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    model = get_peft_model(base, LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "out")]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(merged(ids).logits, model.eval()(ids).logits, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_merged_is_one_message(tmp_path, model_path, adapter_path, capsys):
    def said(*line):
        assert main(["merge", *line]) == 2
        return capsys.readouterr().err

    assert "has no adapter_config.json" in said(model_path, "--out", str(tmp_path / "out"))
    assert "out must be a new or empty folder" in said(adapter_path, "--out", model_path)
    config = json.loads(Path(adapter_path, "adapter_config.json").read_text())
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "/no/such/base"})
    )
    assert "There is no folder '/no/such/base'" in said(str(tmp_path / "lost"), "--out", str(tmp_path / "out"))
    assert "If the base model has moved, name its place with --base." in said(
        str(tmp_path / "lost"), "--out", str(tmp_path / "out")
    )
    assert not (tmp_path / "out").exists()


def test_a_base_that_has_moved_is_named(tmp_path, model_path):
    shutil.copytree(model_path, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    line = ["merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "out")]
    assert main(line) == 2
    assert main([*line, "--base", str(tmp_path / "elsewhere")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
