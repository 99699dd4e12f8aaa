"""Every example runs offline on small parts, under the path that the reference documents name; all but two learn in a test."""

import asyncio
import importlib
import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.harnesses import scripted
from tests.harnesses.scripted import call
from trl import AutoModelForCausalLMWithValueHead, SFTConfig
from trl.experimental.agents import Endpoint, chains_of
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
STACK = "research_projects/stack_llama/scripts"
TOOLS = "research_projects/tools"
TOXICITY = "research_projects/toxicity/scripts"

# Script, its options, the logged metric (None: the one that it prints), and how much that gains.
SCRIPTS = [
    ("scripts/sft", "", "loss", -0.3),
    ("scripts/sft_gemma3", "", "loss", -0.3),
    ("scripts/sft_vlm", "", "mean_token_accuracy", 0.4),
    ("scripts/sft_vlm_gemma3", "--max_steps 10", "loss", -0.5),
    ("scripts/sft_video_llm", "", "mean_token_accuracy", 0.4),
    ("scripts/reward_modeling", "", "margin", 1.0),
    ("scripts/dpo", "", "rewards/margins", 0.3),
    ("scripts/dpo_vlm", "", "rewards/margins", 0.5),
    ("scripts/mpo_vlm", "", "rewards/margins", 0.4),
    ("scripts/cpo", "", "rewards/margins", 0.1),
    ("scripts/orpo", "", "log_odds_chosen", 0.1),
    ("scripts/bco", "--match_prompts true", "loss", -0.01),
    ("scripts/kto", "", "rewards/margins", 0.1),
    ("scripts/gkd", "--max_steps 60", "loss", -0.1),
    ("scripts/dpo_online", "--max_steps 15", "objective/scores", 0.5),
    ("scripts/nash_md", "--max_steps 15", "rewards/chosen", 0.2),
    ("scripts/xpo", "--max_steps 15", "objective/model_scores", 0.5),
    ("scripts/gspo", "--max_steps 15", "reward", 0.1),
    ("scripts/rloo", "--max_steps 15", "reward", 0.1),
    ("scripts/grpo_vlm", "--max_steps 10", "reward", 0.1),
    ("scripts/online_dpo_vlm", "--max_steps 10", "objective/scores", 0.1),
    ("scripts/ppo/ppo", "--total_episodes 320", "objective/scores", 2.0),
    ("scripts/ppo/ppo_tldr", "--total_episodes 320", "objective/scores", 1.0),
    ("scripts/ppo", "--tiny --steps 20", None, 0.2),
    ("scripts/ppo_multi_adapter", "--tiny --steps 20", None, 0.2),
    (f"{TOXICITY}/gpt-j-6b-toxicity", "--tiny --steps 20", None, 2.0),
    (f"{STACK}/supervised_finetuning", "", "loss", -0.1),
    (f"{STACK}/reward_modeling", "--max_steps 20", "accuracy", 0.1),
    (f"{STACK}/rl_training", "--steps 40", None, 0.2),
]
SLOW = [
    ("scripts/prm", "--max_steps 120 --learning_rate 6e-3", "accuracy", 0.3),
    (f"{TOOLS}/triviaqa", "--tiny --steps 10", None, 0.05),
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script of `examples/` in this process with a folder for its output; returns its names."""
    before = set(sys.modules)

    def run_script(script, options=""):
        path, words = EXAMPLES / f"{script}.py", [*options.split(), "--output_dir", str(tmp_path)]
        name = script.removeprefix("scripts/")
        monkeypatch.setattr(sys, "argv", [str(path), *words])
        monkeypatch.setattr(sys, "path", [str(path.parent), str(EXAMPLES), *sys.path])
        if "--tiny" not in options and name in (tiny := importlib.import_module("tiny")).RUNS:
            return tiny.run(name, words)
        return runpy.run_path(str(path), run_name="__main__")

    yield run_script
    for name in set(sys.modules) - before:  # `tiny`, `ppo`, ... would be found by other tests
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(EXAMPLES)):
            del sys.modules[name]


def fine_tune_with(monkeypatch, **changed):
    monkeypatch.setattr("trl.SFTConfig", lambda *words, **settings: SFTConfig(*words, **settings | changed))


@pytest.mark.parametrize(
    ("script", "options", "metric", "gain"),
    [*SCRIPTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
    ids=[" ".join(each[:2]).strip() for each in (*SCRIPTS, *SLOW)],
)
def test_an_example_learns(script, options, metric, gain, run, tmp_path, capsys, monkeypatch):
    if script == f"{TOOLS}/triviaqa":  # half of its conversations leave the policy enough to learn
        fine_tune_with(monkeypatch, per_device_train_batch_size=32)
    found = run(script, options)
    if metric is None:
        pairs = re.findall(r": (-?[\d.]+) -> (-?[\d.]+) over \d+ steps", capsys.readouterr().out)
        first, last = map(float, pairs[0])
    else:
        values = [entry[metric] for entry in found["trainer"].state.log_history if metric in entry]
        first, last = values[0], values[-1]
    assert (last - first) * (1 if gain > 0 else -1) > abs(gain), (first, last)
    assert [*tmp_path.glob("*model.safetensors")], "nothing was saved"


@pytest.mark.slow
def test_tools_and_an_agent_learn_from_one_model(run, tmp_path, capsys, monkeypatch):
    script = "scripts/grpo_agent"
    fine_tune_with(monkeypatch, per_device_train_batch_size=16)  # a quarter of the conversations
    run(script, "--tiny --max_steps 10")
    begun = shutil.move(tmp_path / "tiny" / "model", tmp_path / "begun")
    monkeypatch.setattr("trl.SFTTrainer", Mock())  # the second begins with the model of the first
    (tmp_path / "model.safetensors").unlink()
    fewer = "--max_steps 8 --per_device_train_batch_size 32 --learning_rate 2e-3"
    run(script, f"--tiny --agent {fewer} --model_name_or_path {begun}")
    found = re.findall(r"right results: ([\d.]+) -> ([\d.]+) over \d+ steps", capsys.readouterr().out)
    by_tools, by_agent = (float(last) - float(first) for first, last in found)
    assert by_tools > 0.2 and by_agent > 0.1, found
    assert (tmp_path / "model.safetensors").is_file()


def test_what_is_saved_loads(run, tmp_path):
    run("scripts/prm", "--max_steps 1")
    assert AutoModelForTokenClassification.from_pretrained(tmp_path).config.num_labels == 2
    run("scripts/ppo", "--tiny --steps 1")
    AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))
    run("scripts/ppo", "--tiny --steps 1 --use_peft true")
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_an_adapter_is_merged(run, tmp_path, capsys):
    run(f"{STACK}/merge_peft_adapter")
    moved, error = re.search(r"up to ([\d.]+), merging by (\S+)", capsys.readouterr().out).groups()
    assert float(moved) > 0.1 and float(error) < 1e-5
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_toxicity_is_evaluated(run, tmp_path):
    run(f"{TOXICITY}/evaluate-toxicity", "--num_samples 20")
    head, row = (tmp_path / "toxicity.csv").read_text().splitlines()
    assert head == "model_id,mean_toxicity,std_toxicity"
    assert 0 < float(row.split(",")[1]) < 1


def test_summaries_are_judged(run, capsys):
    found = run("scripts/evals/judge_tldr", "--num_examples 4")
    assert re.search(r"Model win rate: \d+\.00%, 0 of 4 unanswered", capsys.readouterr().out)
    judge = found["SharedWords"]()
    assert judge.judge(["a red bird", "a red bird"], [["a cat", "a bird"], ["red", "no"]]) == [1, 0]


def test_the_interpreter_reaches_nothing_outside_its_process(run, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / TOOLS))
    interpret = runpy.run_path(str(EXAMPLES / TOOLS / "python_interpreter.py"))["interpret"]
    assert interpret("def solution():\n    return 4 * 12 - 9\nprint(solution())") == "39"
    assert interpret("import math\nprint(math.floor(2.5))") == "2"
    for program in ("open('/etc/passwd')", "import socket", "import os; os.system('ls')"):
        assert interpret(program).startswith("PermissionError"), program
    assert interpret("x = 'x' * 10**10") == "MemoryError"
    assert interpret("1 / 0") == "ZeroDivisionError: division by zero"


def test_the_repaired_programs_run_in_a_sandbox(run, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    parts = runpy.run_path(str(EXAMPLES / "repair_agent.py"))
    assert len({task[0] for task in parts["TASKS"]}) == 12
    (row,) = parts["rows"](1, seed=0)
    with parts["Sandbox"](json.loads(row["files"]), allow_network=parts["why_refused"]() is not None) as sandbox:
        before = parts["share_passed"](sandbox, row["tests"]), parts["similarity"](sandbox, row)
        assert parts["answer"](sandbox, "write", {"file": row["file"], "text": row["true"]}, "") == "written"
        assert parts["share_passed"](sandbox, row["tests"]) == parts["similarity"](sandbox, row) == 1
        assert before[0] < 1 and before[1] < 1
        for program in ("import os\nos._exit(0)", "raise SystemExit"):
            sandbox.write(row["file"], program)
            assert parts["share_passed"](sandbox, row["tests"]) == 0
            assert parts["answer"](sandbox, "run_tests", {}, row["tests"]) == "status 0"
        outside = parts["answer"](sandbox, "read", {"file": "../../etc/passwd"}, "")
        assert outside == "Error: ValueError"
        for program, wanted in (
            ("x = 'x' * 10**10", "MemoryError"),
            ("open('f', 'w').write('x' * 10**7)", "large"),
        ):
            status, text = sandbox.run(program)
            assert status != 0 and wanted in text
        if sandbox.prefix:
            assert "ProcessLookupError" in sandbox.run(f"import os; os.kill({os.getpid()}, 0)")[1]
            assert "unreachable" in sandbox.run("import socket; socket.create_connection(('127.0.0.1', 9), 1)")[1]
    assert not sandbox.folder.exists()
    refused = parts["Sandbox"].__init__.__globals__
    monkeypatch.setitem(refused, "why_refused", lambda: "not permitted")
    with pytest.raises(OSError, match="allow_network"):
        parts["Sandbox"]({})


def test_the_agent_that_repairs_programs_is_trained(run, tmp_path, capsys, monkeypatch):
    """That agents learn from such a reward is tested with the calculator above."""
    fine_tune_with(monkeypatch, max_steps=50, per_device_train_batch_size=16)
    run("repair_agent", "--tiny --max_steps 2")
    assert re.search(r"reward \(first\): [\d.]+ -> [\d.]+ over 2 steps", capsys.readouterr().out)
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize("reward", ["tests", "patch", "first"])
def test_the_agent_that_repairs_programs_does_the_whole_task(reward, run, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    parts = runpy.run_path(str(EXAMPLES / "repair_agent.py"))
    (row,) = parts["rows"](1, seed=0)
    file, words = row["file"], scripted.words()
    answers = [call("read", file=file), call("write", file=file, text=row["true"]), call("run_tests"), "done"]
    engine = scripted.Scripted(TransformersEngine(scripted.policy(), tokenizer=words), words, answers)
    agent = parts["Repair"](reward, turns=6, allow_network=parts["why_refused"]() is not None)
    with Endpoint(engine, words, sampling=Sampling(max_new_tokens=1000, seed=0)) as endpoint:
        session = endpoint.session(row)
        assert asyncio.run(agent(row, session.base_url, session.api_key)) == 1
        (chain,) = chains_of(session.turns)
    shown = words.decode(chain.ids)
    assert len(session.turns) == 4 and "written" in shown and "passed" in shown


def test_programs_are_trained(run, tmp_path, capsys, monkeypatch):
    """The loop, its model and its settings are those of TriviaQA, which learns above."""
    fine_tune_with(monkeypatch, max_steps=20)
    run(f"{TOOLS}/python_interpreter", "--tiny --steps 2")
    assert re.search(r"right results: [\d.]+ -> [\d.]+ over 2 steps", capsys.readouterr().out)
    assert [*tmp_path.glob("*model.safetensors")]


def test_the_search_finds_the_text_with_the_rarest_words(run, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / TOOLS))
    wiki = runpy.run_path(str(EXAMPLES / TOOLS / "triviaqa.py"))["Wiki"](
        [
            "Prague lies on the Vltava.\nIt is old.",
            "Vienna lies on the Danube.",
            "Linz lies on the Danube, too.",
        ]
    )
    assert wiki("river of Prague") == "Prague lies on the Vltava."
    assert wiki("the Danube at Linz") == "Linz lies on the Danube, too."
    assert wiki("Madrid") == "Nothing found."


@pytest.mark.parametrize("path", sorted((EXAMPLES / "scripts").rglob("*.py")), ids=lambda path: path.stem)
def test_a_script_runs_when_copied_alone(path, tmp_path, monkeypatch, capsys):
    """Its imports are of packages: nothing beside it is needed to read its options."""
    shutil.copy(path, tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not place.startswith(str(EXAMPLES))])
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(tmp_path / path.name), run_name="__main__")
    options = {
        "judge_tldr": ["--judge_model"],
        "gspo": ["--dataset_name", "--importance_sampling_level", "--lora_target_modules"],
    }
    said = capsys.readouterr().out
    assert not stop.value.code and all(option in said for option in options.get(path.stem, ["--output_dir"]))


@pytest.mark.parametrize("path", sorted((EXAMPLES / "accelerate_configs").iterdir()), ids=lambda path: path.stem)
def test_profiles_lie_where_documents_launch_them(path):
    assert {"distributed_type", "num_processes"} <= yaml.safe_load(path.read_text()).keys()
