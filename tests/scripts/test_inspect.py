"""`trl inspect`: each planted fault is named and nothing else, what is shown is what is trained, and pages are safe."""

import copy
import json
import re
import sys
import tracemalloc

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.tiny_vision import tiny_image
from trl.data.pipeline import Counting, PreparationReport, RowKind
from trl.reporting.run_events import histogram
from trl.scripts import inspect
from trl.scripts.inspection.collect import STREAMED_ROWS, Inspection, blank_model, first_rows
from trl.scripts.inspection.faults import Texts, near_rows, report_faults, shingles
from trl.scripts.inspection.tokens import Part, TokenSequence, piece_roles, row_parts, texts_of
from trl.scripts.pages import render

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
CLEAN = {
    "sft": [{"prompt": f"Q: How many are {n}?", "completion": f" {n} apples."} for n in NUMBERS],
    "dpo": [{"prompt": f"Q: How many are {n}?", "chosen": f" {n} apples.", "rejected": " Next."} for n in NUMBERS],
    "kto": [{"prompt": f"Q: How many are {n}?", "completion": f" {n} apples.", "label": n > "g"} for n in NUMBERS],
    "grpo": [{"prompt": f"Q: How many are {n}?", "answer": n} for n in NUMBERS],
}
LONG = "The sky is blue and the apples are green while seven birds look up and four of them are next to the old tree"


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def always_one(completions, **_):
    return [1.0] * len(completions)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=400, max_position_embeddings=64).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def command(rows, *line, method="sft", test=None):
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for name, part in (("train", rows), ("test", test)):
            if part is not None:
                (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        status = inspect.main([str(folder), "--model", str(model), "--method", method, "--use_cpu", *line])
        return status, capsys.readouterr()

    return command


def test_prompts_of_rewarded_chats_are_no_fault(run):
    rows = [
        {side: chat(row["prompt"], row[side])["messages"] for side in ("chosen", "rejected")} for row in CLEAN["dpo"]
    ]
    status, output = run(rows, "--strict", method="reward")
    assert status == 0, output.out + output.err


@pytest.mark.parametrize("method", CLEAN)
def test_a_clean_set_has_no_fault(method, run):
    status, output = run(CLEAN[method], "--strict", method=method)
    assert (status, "No fault was found." in output.out) == (0, True), output.out + output.err


LONG_ROW = {"prompt": f"Q: {LONG}?", "completion": " five."}
ALIKE_ROW = {"prompt": f"Q: {LONG}?", "completion": " six."}
FAR = " ".join(reversed(LONG.split()))
# What is trained for, rows, options, evaluation rows, and the faults with the first rows that have them.
PLANTED = {
    "repeated, leaked, not in the tokenizer": (
        "sft",
        [*CLEAN["sft"], CLEAN["sft"][2], LONG_ROW, ALIKE_ROW, {"prompt": f"Q: {FAR}?", "completion": " two."},
         {"prompt": "Q: How many?", "completion": " Семь яблок лежат на столе"}],
        (), [CLEAN["sft"][1], {"prompt": f"Q: {FAR}?", "completion": " six."}],
        {"exact duplicates": [8], "near duplicates": [10], "rows of the evaluation set": [1],
         "near rows of the evaluation set": [11], "scripts lost in the tokenizer": [12]},
    ),
    "chats": (
        "sft", [*(chat(row["prompt"], row["completion"]) for row in CLEAN["sft"]), chat("Q: Up?", " ")], (), None,
        {"empty answers": [8], "trained prompts": [0, 1, 2]},
    ),
    "lengths": (
        "sft", [*CLEAN["sft"], LONG_ROW, {"prompt": "Q: How?", "completion": f" {FAR}"}], ("--max_length", "30"), None,
        {"cut rows": [8, 9], "untrained rows": [8]},
    ),
    "context": (
        "sft", [*CLEAN["sft"], {"prompt": f"Q: {LONG} {FAR} {LONG}?", "completion": " five."}], ("--max_length", "500"), None,
        {"rows longer than the context": [8]},
    ),
    "pairs": ("dpo", [*CLEAN["dpo"], {"prompt": "Q: Up?", "chosen": " Look up.", "rejected": " Look up."}], (), None,
              {"equal rows": [8]}),
    "prompts cut for one of a pair": (
        "dpo", [*CLEAN["dpo"], {"prompt": f"Q: {LONG}?", "chosen": f" {FAR}", "rejected": " ."}], ("--max_length", "40"),
        None, {"cut rows": [8], "promptless rows": [8]},
    ),
    "pairs as labels": ("kto", [*CLEAN["dpo"], {"prompt": "Q: Up?", "chosen": " Look up.", "rejected": " Look up."}], (), None,
                        {"equal rows": [8]}),
    "labels": ("kto", [{**row, "label": True} for row in CLEAN["kto"]], (), None, {"one label": []}),
    "rewards": ("grpo", CLEAN["grpo"], ("--reward_funcs", "tests.scripts.test_inspect.always_one", "--answers", "answer"), None,
                {"constant rewards": []}),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED)
def test_planted_faults_are_named_and_nothing_else(case, run, tmp_path):
    method, rows, line, test, faults = PLANTED[case]
    page = tmp_path / "page.html"
    status, output = run(rows, "--strict", "--html", str(page), *line, method=method, test=test)
    cells = re.findall(r"<tr><td>([a-z ]+)</td><td>[\d,]+ of [\d,]+</td><td>([\d, ]*)</td>", page.read_text())
    named = {name: [int(row) for row in first.split(", ") if row] for name, first in cells}
    assert (status, named) == (1, faults), output.out + output.err


def test_a_chat_without_a_stop_token_is_named(run, tmp_path, model):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "bare")
    rows = [chat(row["prompt"], row["completion"]) for row in CLEAN["sft"]]
    template = str(tmp_path / "bare" / "chat_template.jinja")
    status, output = run(rows, "--strict", "--assistant_only_loss", "true", "--chat_template_path", template)
    assert status == 1 and "unstopped rows" in output.out, output.out + output.err


def test_what_is_shown_is_what_is_trained(run):
    _, output = run(CLEAN["sft"][:1])
    assert re.search(r"Q: How many are one\?>> one apples\.(<\|im_end\|>|<eos>|.*)<<", output.out), output.out


def test_cut_tokens_are_marked(run):
    _, output = run([{"prompt": f"Q: {LONG}?", "completion": " five."}] + CLEAN["sft"], "--max_length", "30")
    assert "[[" in output.out and "]]" in output.out


def test_what_rows_say_is_text_on_the_page(run, tmp_path):
    page = tmp_path / "page.html"
    rows = [*CLEAN["sft"], {"prompt": "Q: <script>alert(1)</script>", "completion": " <img src=x onerror=alert(2)>"}]
    run(rows, "--html", str(page))
    text = page.read_text()
    assert "<script" not in text and "<img" not in text and not re.search("https?:", text)
    assert "&lt;" in text


def test_packing_is_measured(run):
    _, output = run(CLEAN["sft"], "--packing", "true", "--max_length", "64")
    rows, filled = re.search(
        r"packed +(\d+) rows of 64 tokens, ([\d.]+) % filled".replace(" %", "%"), output.out
    ).groups()
    lengths = int(re.search(r"tokens +(\d+)", output.out).group(1))
    assert float(filled) == pytest.approx(100 * lengths / int(rows) / 64, abs=0.06)


def test_a_stream_shows_what_the_same_rows_stored_do(run):
    rows = [*CLEAN["sft"], CLEAN["sft"][2], {"prompt": "Q:", "completion": " "}]
    outputs = [run(rows, *line)[1].out for line in ((), ("--dataset_streaming", "true", "--max_steps", "1"))]
    assert outputs[0] == outputs[1] and "exact duplicates: 1 of 10 rows (first: 8)" in outputs[0]


def test_a_stream_without_an_end_is_read_to_a_bound():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield {"text": f"Look up {len(read)}."}

    stream = IterableDataset.from_generator(endless)
    assert len(first_rows(stream, 50)) == 50 and len(read) <= 51
    read.clear()
    assert len(first_rows(stream, None)) == STREAMED_ROWS and len(read) <= STREAMED_ROWS + 1


def test_configs_of_gpus_are_inspected_without_one(run):
    line = ("--bf16", "true", "--use_vllm", "true", "--vllm_mode", "colocate")
    status, output = run(CLEAN["grpo"], "--strict", *line, method="grpo")
    assert (status, "No fault was found." in output.out) == (0, True), output.out + output.err


def test_the_first_rows_alone_are_read(run):
    rows = [*CLEAN["sft"], CLEAN["sft"][0]]
    assert run(rows, "--strict", "--rows", "8")[0] == 0
    assert run(rows, "--strict")[0] == 1


@pytest.mark.parametrize(("line", "message"), [
    (("--rows", "0"), "--rows must be at least 1"),
    (("--html", "/no/such/folder/page.html"), "Make the folder"),
    (("--eval_strategy", "steps", "--eval_steps", "5"), "dataset_test_split"),
    (("--max_lenght", "8"), "max_length"),
    (("--answers", "answr"), "--answers must be one of the columns prompt, completion, got 'answr'."),
    (("--answers", "completion"), "--answers needs the --reward_funcs"),
    (("--model", "no/such-model"), "The config 'no/such-model' is not at"),
])  # fmt: skip
def test_bad_options_are_one_message(line, message, run, capsys):
    try:
        status, output = run(CLEAN["sft"], *line)
    except SystemExit as stop:
        status, output = stop.code, capsys.readouterr()
    assert status == 2 and message in output.err and "Traceback" not in output.err


def test_many_rows_take_bounded_memory():
    rows = Dataset.from_dict({"text": ["Look up."] * 10}).select(np.zeros(60_000, dtype=np.int64))
    tracemalloc.start()
    texts = Texts(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert texts.is_first.sum() == 1
    assert peak < 4e6  # 8 bytes for a row, and one block of rows


def test_rows_that_differ_take_no_more_than_a_number_each(monkeypatch):
    rows = Dataset.from_dict({"text": [f"Look up {number}." for number in range(50_000)]})
    monkeypatch.setattr("trl.scripts.inspection.faults.COMPARED_ROWS", 100)
    tracemalloc.start()
    texts = Texts(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert texts.is_first.all() and len(texts.compared) == 100
    assert peak < 4e6


def test_without_the_library_near_duplicates_are_not_searched(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    status, output = run([*CLEAN["sft"], LONG_ROW, ALIKE_ROW], "--strict")
    assert status == 0 and re.search("near duplicates +not searched: pip install datasketch", output.out)


def numbered(*texts, start=0):
    return {number: shingles(text) for number, text in enumerate(texts, start)}


def test_near_duplicates_are_those_with_most_shingles():
    others = numbered(LONG, " ".join(reversed(LONG.split())))
    turned = " ".join(LONG.split()[12:] + LONG.split()[:12])
    rows = numbered(f"{LONG} indeed", turned, "Look up.", start=2)
    assert near_rows(rows, others) == ([], [2])  # 21 of 22 shingles are shared; 19 of 23 of row 3
    assert near_rows(others, {}) == near_rows(rows, {}) == ([], []) and near_rows({**others, **rows}, {}) == ([2], [])


def test_roles_of_pieces_follow_the_texts():
    parts = row_parts(chat("Up?", "Look up."))
    assert [part.is_answer for part in parts] == [False, True]
    assert piece_roles(["<u>", "Up", "?", "<a>", "Look", " up", ".", "<e>"], parts) == [
        None, "user", "user", None, "assistant", "assistant", "assistant", None
    ]  # fmt: skip


def test_histograms_count_every_number():
    assert [count for count, _ in histogram(np.array([1, 1, 2, 5]), "tokens")] == [2, 1, 0, 0, 1]
    assert histogram(np.array([0.5]), "reward") == [(1, "0.5 to 0.5 reward")]
    wide = histogram(np.arange(100), "tokens")
    assert [wide[0], wide[-1], len(wide)] == [(3, "0 to 2 tokens"), (1, "99 to 101 tokens"), 34]
    page = render("inspection.html", inspection=Inspection("sky", {}, {"Tokens": wide}, tiny_tokenizer(), [], []))
    assert page.count('height="100.0"><title>') == 33 and 'height="33.33"><title>99 to 101 tokens: 1</title>' in page


def test_the_page_shows_the_ends_of_long_sequences():
    sequence = TokenSequence("text", [*range(700)], ["masked"] * 700, ["a"] * 700, [None] * 700)
    inspection = Inspection("sky", {}, {}, tiny_tokenizer(), [], [(3, [sequence])])
    page = render("inspection.html", inspection=inspection, zip=zip)
    ids = [int(number) for number in re.findall(r"title='(\d+):", page)]
    assert ids == [*range(300), *range(400, 700)] and "> … 100 tokens … <" in page and "text: 700 tokens" in page


def test_rows_with_images_are_refused(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"images": [tiny_image(count)], **chat("How many?", "Two apples.")} for count in (1, 2)]
    Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    status = inspect.main([str(tmp_path / "train.parquet"), "--model", str(model)])
    assert (status, "`trl sft --dry_run true` shows rows with images" in capsys.readouterr().err) == (2, True)


def test_blank_models_take_no_memory():
    config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    model = blank_model(AutoModelForCausalLM, config)
    assert sum(x.numel() for x in model.parameters()) > 60e9
    for other in (model, copy.deepcopy(model)):  # a reference
        assert sum(x.untyped_storage().nbytes() for x in other.parameters()) < 1e4


def test_copies_of_blank_models_have_added_tokens():
    model = blank_model(AutoModelForCausalLM, LlamaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=400))
    model.resize_token_embeddings(403, mean_resizing=False)
    assert len(copy.deepcopy(model).get_input_embeddings().weight) == 403


def test_characters_of_several_tokens_belong_to_their_text():
    text, tokenizer = "Is it 😀😀 or ✓ \ufffd не?", tiny_tokenizer()
    ids = tokenizer(f"<|im_start|>user\n{text}<|im_end|>")["input_ids"]
    pieces = texts_of(ids, tokenizer)
    assert "".join(pieces) == tokenizer.decode(ids)
    roles = piece_roles(pieces, [Part("messages", "user", text, False)])
    assert (pieces[:5], roles[:4], roles[-1]) == (["<|im_start|>", "u", "ser", "\n", "I"], [None] * 4, None)
    assert set(roles[4:-1]) == {"user"}


def test_a_row_with_two_faulty_sequences_is_named_once():
    report, none = PreparationReport("train"), np.zeros(4, int)
    numbers = {"row": np.array([0, 0, 1, 2]), "tokens": none + 1, "removed_tokens": none}
    numbers["untrained_rows"] = np.array([1, 1, 1, 0])
    Counting(RowKind, report, "report").tally(numbers, is_whole=False)
    (fault,) = report_faults(report)
    assert (fault.count, fault.rows) == (3, [0, 1])


def test_a_second_prompt_of_a_pair_is_not_trained(run, tmp_path):
    _, rows, line, _, _ = PLANTED["prompts cut for one of a pair"]
    run(rows, *line, "--html", str(tmp_path / "page.html"), method="dpo")
    counts = re.findall(r"<h4>(\w+): \d+ tokens, (\d+) trained", (tmp_path / "page.html").read_text())
    trained = {title: int(count) for title, count in counts}
    assert (trained["prompt"], trained["rejected_prompt"], trained["rejected"] > 0) == (0, 0, True)
