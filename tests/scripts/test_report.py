"""`trl report`: the page has what runs wrote, in bounded size; what a completion says is text; Chromium shows it without an error."""

import html
import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.scripts.made_runs import HOSTILE, SEARCH, make_run
from tests.trainer import grpo_runs, grpo_tool_runs
from trl.cli.main import main
from trl.reporting.run_events import EVENTS
from trl.rewards import RewardError
from trl.scripts import report
from trl.scripts.pages import embedded
from trl.scripts.pages.runs import BINS, PAGE_BYTES, POINTS, Run, curves_of, histogram_over_time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def written(*folders, page, **options):
    report.write_page(folders, page, **options)
    text = page.read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    return text, json.loads(data)


def test_two_runs_are_on_a_page_and_what_they_say_is_text(tmp_path):
    folders = [make_run(tmp_path / name, seed=seed, grows=seed == 1) for seed, name in enumerate(("one", "two"))]
    text, (one, two) = written(*folders, page=tmp_path / "page.html")
    assert "<script>alert" not in text and "<img" not in text and "http:" not in text and "https:" not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert (
        text.count("answer length") == 1
        and "Answers went from 7 to 15 tokens" in text
        and "&lt;script&gt;alert(1)" in text
    )
    assert re.findall(r'<tr class="differs"><th scope="row">(\w+)</th>', text) == ["learning_rate", "checkpoints"]
    assert one["curves"]["reward"] == [[n, float(f"{n / 12:.5g}")] for n in range(1, 13)]
    assert [row["step"] for row in two["completions"]] == [3] * 8 + [6] * 8 + [9] * 8 + [12] * 8
    hostile, messages, plain = two["completions"][:3]
    assert hostile["completion"].startswith(HOSTILE) and messages["completion"] == SEARCH
    assert plain["completion"] == "".join(plain["texts"]) and len(plain["logps"]) == plain["length"] == 20
    assert plain["logps"][-1] is None and -8 <= min(plain["logps"][:-1]) < 0
    assert [len(row["entropies"]) for row in two["completions"][:8]] == [20] * 4 + [0] * 4
    assert set(hostile["entropies"]) == {0.5}
    assert sum(map(sum, one["histograms"]["rewards"]["counts"])) == 12 * 16 and "10 to 20 tokens: 9" in text
    assert "7.2 s, 60% of the steps" in text and "1.00 GiB" in text and "Left out" not in text


def test_reading_a_run_needs_no_torch(tmp_path):
    folder = make_run(tmp_path / "run")
    checkpoint = folder / "checkpoint-3"
    checkpoint.mkdir()
    save_file({"a": np.zeros(1, np.float32)}, checkpoint / "model.safetensors")
    for name in ("trainer_state.json", "optimizer.safetensors", "scheduler.json", "rng_state.json"):
        (checkpoint / name).write_text("{}")
    code = (
        "import sys; from trl.cli.main import main; status = main(sys.argv[1:])\n"
        "assert not status and not {'torch', 'transformers', 'datasets'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, "report", str(folder)], check=True)


def test_a_thousand_steps_stay_below_two_megabytes(tmp_path):
    run = make_run(tmp_path / "run", steps=1000, parts=40, rows=32, tokens=120, metrics=40)
    text, (data,) = written(run, page=tmp_path / "page.html")
    assert len(text.encode()) < 2_000_000
    chosen = data["completions"]
    steps = sorted({row["step"] for row in chosen})
    assert f"{len(chosen)} completions of {len(steps)} of 40 kept steps are here" in text
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert 10 < len(steps) < 40 and steps[-1] == 1000 and max(gaps) <= 2 * min(gaps)
    assert sum(row["step"] == 1000 for row in chosen) == 32 and len(data["curves"]["loss"]) <= POINTS
    two = [Run(run, "a", share=0.5).data, Run(run, "b", share=0.5).data]
    assert len(embedded(two).encode()) < 2_000_000


@pytest.mark.parametrize("share, most", [(1e-6, 1), (0.02, 12)])
def test_a_page_ends_where_not_even_a_step_fits(share, most, tmp_path):
    page = Run(make_run(tmp_path / "run", parts=4, rows=32, tokens=300), "run", share=share)
    rows = page.data["completions"]
    assert {row["step"] for row in rows} == {12} and 1 <= len(rows) <= most
    assert "of 1 of 4 kept steps" in page.notes[-1]
    assert len(rows[0]["texts"]) == 300 and (most == 1 or len(embedded(page.data)) < share * PAGE_BYTES)


def test_equal_values_have_one_end():
    rollouts = [{"step": step, "rewards": [0.0] * 4} for step in (1, 2)]
    assert {histogram_over_time(rollouts, "rewards")[end] for end in ("low", "high")} == {0.0}


def test_longer_curves_are_means_of_neighbours_and_histograms_count_all():
    logs = [
        {"step": step, "values": {"loss": float(step), "kl": float("nan")}, "memory": 2.0**31}
        for step in range(1, 2 * POINTS + 1)
    ]
    notes = []
    curves = curves_of(logs, 10**6, notes)
    assert curves["loss"][:2] == [(2, 1.5), (4, 3.5)]
    assert (
        "kl" not in curves
        and {value for _, value in curves["memory (GiB)"]} == {2.0}
        and notes == ["a point of a curve is the mean of 2 logs"]
    )
    histogram = histogram_over_time(
        [{"step": 1, "rewards": [0.0, None, 1.0, float("inf")]}, {"step": 2, "rewards": [1.0]}], "rewards"
    )
    first, second = histogram["counts"]
    assert (first[0], first[-1], second[-1], sum(first)) == (1, 1, 1, 2) and len(first) == BINS


def test_what_trainers_write_is_shown(tmp_path, capsys):
    grpo_tool_runs.run(folder=str(tmp_path / "tools"), max_steps=2, save_strategy="steps", save_steps=2)
    grpo_runs.run("rloo", folder=str(tmp_path / "rloo"), max_steps=1)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "tools"), str(tmp_path / "rloo"), "--html", str(page)]) == 0
    text, data = written(tmp_path / "tools", tmp_path / "rloo", page=page)
    roles = [turn["role"] for row in data[0]["completions"] for turn in row["completion"]]
    assert {"assistant", "tool"} <= set(roles) and "checkpoint-2" in text and "ended after step 1 of 1" in text
    assert f"trl chat {tmp_path / 'tools' / 'checkpoint-2'}" in text and "None was seen" in text
    assert "no sign of a fault" in capsys.readouterr().out


def test_a_run_that_an_error_stops_says_so(tmp_path, capsys):
    def fails_at_2(completions, trainer_state, **_):
        if trainer_state.global_step == 2:
            raise KeyError("no such answer")
        return [0.0] * len(completions)

    with pytest.raises(RewardError):
        grpo_runs.run("rloo", reward_funcs=fails_at_2, folder=str(tmp_path / "run"), max_steps=4, logging_steps=10)
    assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html"), "--watch"]) == 0  # and ends
    assert "run stopped after step 2 of 4 by RewardError: " in capsys.readouterr().out


def test_a_page_is_written_again_until_the_run_ends(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", ends=False)
    pages = []

    def end(seconds):
        pages.append((seconds, (run / "report.html").read_text()))
        with (run / EVENTS).open("ab") as file:
            file.write(b'{"event": "end", "step": 12, "time": 13.0}\n')

    monkeypatch.setattr(report.time, "sleep", end)
    assert report.main([str(run), "--watch", "3"]) == 0
    ((seconds, page),) = pages
    assert seconds == 3 and '<meta http-equiv="refresh" content="3.0">' in page and "is going on" in page
    assert '<meta http-equiv="refresh"' not in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "has no run.jsonl of a run"),
        (["missing"], "missing has no run.jsonl of a run"),
        ([__file__], "test_report.py has no run.jsonl of a run"),
        (["--watch", "0"], "must be > 0"),
    ],
)
def test_what_cannot_be_shown_is_named(options, words, tmp_path, capsys):
    assert report.main([*options, str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_named(tmp_path, capsys):
    run, page = make_run(tmp_path / "run"), tmp_path / "missing" / "page.html"
    assert report.main([str(run), "--html", str(page)]) == 2
    assert f"--html {page} is in a folder that does not exist. Make the folder." in capsys.readouterr().err


DRIVE = """
<script>
const opened = performance.now(), errors = [], choose = (input, value) => { input.value = value; input.dispatchEvent(new Event("input", { bubbles: true })); };
window.addEventListener("error", (event) => errors.push(event.message));
document.addEventListener("securitypolicyviolation", (event) => errors.push(event.blockedURI));
choose(smoothing, 0.9); choose(from, 100); choose(to, 200); choose(metric, "rew");
const coloured = () => [...document.querySelectorAll("#answer-list .tokens span")].filter((span) => span.style.background).length;
choose(shade, "logps");
const shaded = document.querySelectorAll("#answer-list span[title]").length, byLogps = coloured();
choose(shade, "entropies");
const byEntropy = coloured(), title = document.querySelector("#answer-list span[title]").title;
choose(shade, "");
shown.selectedIndex = shown.options.length - 1; choose(shade, "");
const stated = { opened, errors, shaded, byLogps, byEntropy, title, cards: document.querySelectorAll(".card").length, options: [shown.options[0].text, shown.options[shown.options.length - 1].text], view: [from.value, to.value].map(Number),
  charts: charts.filter((chart) => !chart.figure.hidden).map((chart) => chart.name), paths: document.querySelectorAll("path.raw").length,
  alerts: document.querySelectorAll("img").length, tool: document.querySelectorAll(".tree .tree").length, calls: document.querySelector(".tree .tool").textContent, parts: document.querySelector(".tree .tree .tokens").textContent };
const out = document.createElement("pre"); out.id = "stated"; out.textContent = JSON.stringify(stated); document.body.append(out);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_chromium_shows_it_without_errors_or_requests(tmp_path):
    run = make_run(tmp_path / "run", steps=1000, parts=8, rows=8, tokens=60, metrics=30)
    text, _ = written(run, page=tmp_path / "page.html")
    (tmp_path / "driven.html").write_text(text.replace("</body>", DRIVE))
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/profile",
    ]
    shown = subprocess.run(
        [*command, "--dump-dom", f"file://{tmp_path}/driven.html"], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    stated = json.loads(html.unescape(re.search(r'<pre id="stated">(.*?)</pre>', shown.stdout, re.DOTALL)[1]))
    print("opened after", round(stated["opened"]), "ms")
    assert stated["errors"] == [] and stated["alerts"] == 0
    assert stated["view"] == [100, 200] and stated["charts"] == ["reward"] and stated["paths"] == 33
    call = json.dumps({"query": HOSTILE}, separators=(",", ":"))
    assert stated["tool"] > 0 and stated["calls"] == f"calls search({call})" and HOSTILE in stated["parts"]
    assert stated["byLogps"] == 8 * 60 and stated["byEntropy"] == 4 * 60
    assert re.fullmatch(r"log-prob -?[\d.]+, entropy 0.5", stated["title"])
    assert (
        stated["shaded"] == 8 * 60
        and stated["cards"] > 0
        and stated["options"][0] == "run: step 1000"
        and stated["opened"] < 5_000
    )
