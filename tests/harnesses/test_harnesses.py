"""Real harnesses train a policy over the endpoint. `make test-harnesses` installs them; tests of those that are missing are skipped."""

import os
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from tests.harnesses.scripted import Scripted, call, logps_of, policy, words
from trl import GRPOConfig, GRPOTrainer
from trl.agents.sessions import Session

HARNESSES = Path(os.environ.get("HARNESSES", Path(__file__).parents[2] / ".harnesses"))
FIXED = "def add(a, b):\n    return a + b\n"
WRONG = FIXED.replace("+", "-")
ROW = {
    "prompt": [{"role": "user", "content": "The function add of sums.py is wrong. Repair it."}],
    "files": {"sums.py": WRONG, "test.py": "from sums import add\nassert add(2, 3) == 5\n"},
}


def code(text):
    return f"<code>\n{text}\n</code>"


COMMANDS = ["cat sums.py", "sed -i 's/a - b/a + b/' sums.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
# What the policy writes turn by turn, and the number of chains: more than one where a harness changes its history.
SCRIPTS = {
    "smolagents:code": ([code("print(read('sums.py'))"), code(f"write('sums.py', {FIXED!r})"), code("final_answer(1)")], 1),
    "smolagents:tools": ([call("read", file="sums.py"), call("write", file="sums.py", text=FIXED), call("final_answer", answer=1)], 3),
    "mini-swe-agent:tools": ([call("bash", command=each) for each in COMMANDS], 1),
    "mini-swe-agent:text": ([f"```mswea_bash_command\n{each}\n```" for each in COMMANDS], 1),
    "aider": ([f"sums.py\n```\n{text}```" for text in (WRONG.replace("-", "*"), FIXED)], 2),
}  # fmt: skip


def trainer_of(name, folder, answers=None, **settings):
    class Trainer(GRPOTrainer):
        def rollout_engine(self, engine):
            return engine if answers is None else Scripted(engine, words(), answers)

    args = GRPOConfig(
        str(folder), max_steps=1, num_generations=2, per_device_train_batch_size=2, learning_rate=1e-3, report_to="none",
        use_cpu=True, bf16=False, save_strategy="no", logging_steps=1, disable_tqdm=True, **settings,
    )  # fmt: skip
    program = str(Path(__file__).with_name("run.py"))
    agent = [sys.executable, program, name, str(HARNESSES), "{base_url}", "{api_key}", "{row}"]
    return Trainer(
        policy(), lambda completions, **_: [0.0, 0.1], args, Dataset.from_list([ROW]), processing_class=words(), agent=agent
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("scripted", [True, False], ids=["scripted", "random"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_harness_trains_a_policy(name, scripted, tmp_path, monkeypatch):
    if not (HARNESSES / name.partition(":")[0] / "bin").is_dir():
        pytest.skip(f"{name} is not in {HARNESSES}: run make test-harnesses")
    sampled, finish = [], Session.finish
    monkeypatch.setattr(
        Session, "finish", lambda self, turn, found: (sampled.append(found.ids), finish(self, turn, found))
    )
    answers, chains = SCRIPTS[name] if scripted else (None, None)
    limits = {} if scripted else {"agent_max_turns": 2, "max_completion_length": 32}
    trainer = trainer_of(name, tmp_path, answers, **limits)
    trainer.train()
    rows = trainer._rollout_batch
    logs = trainer.state.log_history[0]
    assert logs["agent/failures/raised"] == logs["agent/failures/silent"] == 0 and logs["grad_norm"] > 0
    if scripted:
        assert logs["rewards/agent_reward/mean"] == 1
        assert rows.per_row["agent_turns"].tolist() == [len(answers)] * 2
        assert rows.per_row["agent_chains"].tolist() == [chains] * 2
    is_sampled, logps = ~rows.per_token["tool_output"], rows.per_token["sampling_logps"]
    trained, place, before = [], 0, policy()
    for prompt, completion in rows.parts():
        here = slice(place, place := place + len(completion))
        own = logps_of(before, [*prompt.tolist(), *completion.tolist()])[-len(completion) :]
        assert (own - logps[here])[is_sampled[here]].abs().max() < 1e-5
        marks = is_sampled[here].tolist()
        for n, (token, mark) in enumerate(zip(completion.tolist(), marks, strict=True)):
            if mark and (n == 0 or not marks[n - 1]):
                trained.append([])
            if mark:
                trained[-1].append(token)
    assert place == len(is_sampled) and sorted(trained) == sorted(sampled)
