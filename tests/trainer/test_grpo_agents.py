"""GRPO with agents: sessions over HTTP are completions, trees of turns are trained once, and resuming continues them."""

import asyncio
import ctypes
import itertools
import json
import signal
import sys
import time
from pathlib import Path

import numpy as np
import openai
import psutil
import pytest
import torch
from datasets import Dataset

from tests.agents.test_sessions import connection, waits_for
from tests.agents.tool_words import TOOLS
from tests.trainer.agent_kill_runs import make as make_kill_run
from tests.trainer.grpo_agent_runs import ROWS, agents, forgetful, tool_agent, trained
from tests.trainer.grpo_runs import logs
from tests.trainer.grpo_tool_runs import QUESTIONS, caller
from tests.two_processes import ending, launch
from trl.agents.journal import Journal, _records
from trl.agents.sessions import Session
from trl.experimental.agents import read_sessions
from trl.generation.vllm.engine import VLLMEngine
from trl.reporting import deadlines
from trl.trainer import group_setup


@pytest.mark.parametrize("method", ["grpo", "rloo"])
@pytest.mark.parametrize("agent", [tool_agent, forgetful])
def test_an_agents_session_is_a_completion(method, agent):
    trainer, _ = trained(method, agent=agent, max_steps=1)
    rows = trainer._rollout_batch
    assert rows.per_row["agent_turns"].tolist() == [2 if agent is tool_agent else 3] * len(rows)
    chains = rows.per_row["agent_chains"]
    assert (chains == (1 if agent is tool_agent else 3)).all()
    parts = list(rows.parts())
    assert len(parts) == int(chains.sum())
    torch.testing.assert_close(torch.cat([part for _, part in parts]), rows.completions.values)
    tree = rows.as_batch(prefix_sharing=True)  # all parts begin with the row's prompt, which stands once in a group
    firsts, group = rows.prompts.lengths, trainer.args.num_generations
    whole = sum(len(prompt) + len(completion) for prompt, completion in parts)
    assert tree["input_ids"].numel() == whole - int((firsts * chains).sum()) + int(firsts[::group].sum())
    assert torch.equal(tree["scored_target"], rows.completions.values)
    found = logs(trainer)[0]
    assert found["reward"] == pytest.approx(found["rewards/agent_reward/mean"]) and found["reward"] > 0
    assert found["agent/turns"] == rows.per_row["agent_turns"].double().mean()
    assert found["agent/failures/raised"] == 0
    assert "sampling_logps" in rows.per_token and rows.per_token["sampling_logps"].dtype == torch.float64


@pytest.mark.parametrize("agent", [tool_agent, forgetful])
def test_the_gradient_is_that_of_each_part_alone(agent):
    """GRPO's first step, on-policy: the sum over sampled tokens of advantage times the gradient of their log-prob."""
    trainer, gradients = trained(agent=agent, max_steps=1, beta=0.0, loss_type="grpo", scale_rewards="none")
    rows, policy = trainer._rollout_batch, caller()
    advantages = rows.per_row["advantage"]
    trained_tokens = ~rows.per_token["tool_output"]
    row_of_token = rows.completions.row_index
    counts = torch.zeros(len(rows)).double().index_add_(0, row_of_token, trained_tokens.double())
    logps = []
    for prompt, completion in rows.parts():
        ids = torch.cat([prompt, completion])[None]
        own = policy(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        logps.append(own[len(prompt) - 1 :])
    weights = trained_tokens * (advantages / counts)[row_of_token] / len(rows)
    gap = (torch.cat(logps).detach() - rows.per_token["sampling_logps"])[trained_tokens].abs().max()
    assert gap < 1e-9
    (-(torch.cat(logps) * weights).sum()).backward()
    named = dict(policy.named_parameters())
    for name, value in gradients.steps[0].items():
        torch.testing.assert_close(value, named[name].grad, rtol=1e-8, atol=1e-12)


def test_prompts_may_be_texts():
    async def writer(row, base_url, api_key):
        client = openai.AsyncOpenAI(**connection(base_url, api_key))
        answer = await client.completions.create(model="policy", prompt=row["prompt"], max_tokens=4)
        return len(answer.choices[0].text)

    rows = Dataset.from_list([{"prompt": text, "number": number} for number, text in enumerate(QUESTIONS)])
    trainer, _ = trained(agent=writer, data=rows, max_steps=1)
    assert logs(trainer)[0]["agent/failures/raised"] == 0 and logs(trainer)[0]["reward"] > 0


def test_gradients_do_not_depend_on_who_is_first():
    async def slow(row, base_url, api_key):
        await asyncio.sleep(0.05 * (row["number"] % 3))
        return await tool_agent(row, base_url, api_key)

    first, second = (trained(agent=agent)[1].steps for agent in (tool_agent, slow))
    alone = trained(agent_concurrency=1)[1].steps
    for other in (second, alone):
        for mine, theirs in zip(first, other, strict=True):
            for name in mine:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-12)


ERRORS = itertools.cycle([OSError, SystemExit, TimeoutError])
KEYS = []
MALFORMED = itertools.cycle(["much", {"score": 1.0}, [1.0], float("inf")])


async def unreliable(row, base_url, api_key):
    if row["number"] == 0:
        KEYS.append(api_key)
        raise next(ERRORS)(f"no such luck with {api_key}")
    if row["number"] == 1:
        await asyncio.sleep(60)
    if row["number"] == 2:
        return 3.0
    if row["number"] == 3:
        return next(MALFORMED)
    return await tool_agent(row, base_url, api_key)


def test_sessions_that_fail_have_no_reward_and_are_counted(caplog):
    """Neither their own nor from reward functions, which are not given them."""
    graded = []

    def number(number, completions, **_):
        graded.extend(number)
        return [0.5] * len(completions)

    given = {"agent_deadline": 2.0, "per_device_train_batch_size": 20, "max_steps": 1}
    trainer, _ = trained(agent=unreliable, given={"reward_funcs": number}, **given)
    assert caplog.text.count("An agent failed") == 6 and "no such luck with ***" in caplog.text
    assert 'api_key}")\nTimeoutError: no such luck' in caplog.text  # with its place
    assert KEYS and not any(key in caplog.text for key in KEYS)
    assert "without an answer of the policy" in caplog.text and "not answer within 2 s" in caplog.text
    assert "gave 'much' (a str)" in caplog.text and graded == [4] * 4
    found = logs(trainer)[0]
    for kind in ("raised", "deadline", "silent", "malformed"):
        assert found[f"agent/failures/{kind}"] == pytest.approx(0.2), kind
    scores = trainer._rollout_batch.per_row["scores"]
    assert scores.isnan().sum() == 16


async def broken(row, base_url, api_key):
    raise OSError(f"no sandbox for {api_key}")


async def another_temperature(row, base_url, api_key):
    client = openai.AsyncOpenAI(**connection(base_url, api_key))
    await client.chat.completions.create(model="gpt-4o", messages=row["prompt"], temperature=0.7)


async def silent(row, base_url, api_key):
    return 3.0


@pytest.mark.parametrize(
    ("agent", "settings", "named"),
    [
        (broken, {}, r"raised: OSError: no sandbox for \*\*\*"),
        (broken, {"generation_parts": 2}, "no sandbox"),
        (another_temperature, {"agent_sampling": "strict"}, r"temperature=0.7 differs from this session's 1"),
        (silent, {}, "silent: .* without an answer of the policy"),
        ([sys.executable, "-c", "raise OSError('no tools')", "{base_url}"], {}, "no tools"),
    ],
)
def test_a_batch_of_failures_ends_the_run_with_their_cause(agent, settings, named):
    graded = []
    given = {"reward_funcs": lambda completions, **_: graded.append(1) or [0.0] * len(completions)}
    with pytest.raises(RuntimeError, match=f"(?s)All sessions of a rollout batch failed.*{named}"):
        trained(agent=agent, given=given, **settings)
    assert not graded


def test_a_run_ended_by_failures_may_be_resumed(tmp_path):
    """Its second step fails. When it is resumed all sessions of that step are run again, with the same tokens."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "folder": str(tmp_path / "again")}
    begun, breaks = [], [True]

    async def agent(row, base_url, api_key):
        begun.append(row["number"])
        reward = await tool_agent(row, base_url, api_key)
        if breaks[0] and len(begun) > 8:
            raise OSError("the tools are gone")
        return reward

    with pytest.raises(RuntimeError, match="the tools are gone"):
        trained(agent=agent, **settings)
    assert len(begun) == 16 and (tmp_path / "again" / "checkpoint-1").is_dir()
    breaks[0] = False
    again, _ = agents(agent=agent, **settings)
    again.train(resume_from_checkpoint=True)
    assert len(begun) == 16 + 16
    whole, _ = trained(**{**settings, "folder": str(tmp_path / "whole")})
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_an_evaluation_of_failures_ends_nothing():
    async def fails_on_one(row, base_url, api_key):
        if row["number"] == 1:
            raise OSError
        return await tool_agent(row, base_url, api_key)

    trainer, _ = trained(agent=fails_on_one, max_steps=1, data=ROWS.select([0, 2]))
    assert trainer.evaluate(ROWS.select([1]))["eval_agent/failures/raised"] == 1.0


def test_settings_of_agents_are_ignored_with_one_warning(caplog):
    trainer, _ = trained(agent=wordy(temperature=0.7, top_p=0.5))
    plain, _ = trained(agent=wordy())
    assert caplog.text.count("which is ignored") == 1 and "temperature=0.7, top_p=0.5" in caplog.text
    assert torch.equal(trainer._rollout_batch.completions.values, plain._rollout_batch.completions.values)
    logps = (each._rollout_batch.per_token["sampling_logps"] for each in (trainer, plain))
    torch.testing.assert_close(*logps, rtol=0, atol=1e-9)


def wordy(**settings):
    async def agent(row, base_url, api_key):
        client = openai.AsyncOpenAI(**connection(base_url, api_key))
        given = {"model": "gpt-4o", "messages": row["prompt"], **settings}
        return (await client.chat.completions.create(**given)).usage.completion_tokens

    return agent


def test_settings_of_agents_may_be_taken():
    """Sampled at 0.5 with top_p, learned at 1: the mismatch is known exactly, and corrected as that of another sampler."""
    given = {"agent_sampling": "agent", "vllm_importance_sampling_mode": "token_truncate"}
    trainer, _ = trained(agent=wordy(temperature=0.5, top_p=0.9), max_steps=1, **given)
    rows, policy = trainer._rollout_batch, caller()
    assert not trainer.sampler_is_exact and not rows.per_token["tool_output"].any()
    logps = {0.5: [], 1.0: []}
    for prompt, completion in rows.parts():
        with torch.no_grad():
            logits = policy(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        for temperature in logps:
            scored = (logits / temperature).log_softmax(-1)
            logps[temperature].append(scored.gather(1, completion[:, None])[:, 0])
    cold, plain = map(torch.cat, logps.values())
    sampled = rows.per_token["sampling_logps"] + rows.per_token["sampling_kept"]
    torch.testing.assert_close(sampled, cold, rtol=0, atol=1e-9)
    expected = (plain - cold).exp().clamp(max=trainer.args.vllm_importance_sampling_cap)
    torch.testing.assert_close(rows.per_token["correction"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("streams", [False, True])
def test_rows_of_agents_need_no_prompt(streams, tmp_path):
    rows, shown = [], []

    async def solver(row, base_url, api_key):
        rows.append(dict(row))
        client = openai.AsyncOpenAI(**connection(base_url, api_key))
        messages = [{"role": "user", "content": row["task"]}]
        await client.chat.completions.create(model="gpt-4o", messages=messages)
        return float(row["number"])

    def graded(prompts, completions, task, **_):
        shown.extend(zip(prompts, completions, task, strict=True))
        return [0.0] * len(prompts)

    data = Dataset.from_list([{"task": text, "number": number} for number, text in enumerate(QUESTIONS)])
    settings = {"max_steps": 1, "agent_keep_sessions": True, "folder": str(tmp_path), "log_completions": True}
    given = {"reward_funcs": graded}
    trainer, _ = trained(agent=solver, data=data.to_iterable_dataset() if streams else data, given=given, **settings)
    assert all(row.keys() == {"task", "number"} for row in rows) and logs(trainer)[0]["reward"] > 0
    assert all(completion[0]["role"] == "assistant" for _, completion, _ in shown) and len(shown) == 8
    assert all(record["row"].keys() == {"task", "number"} for record in read_sessions(tmp_path / "sessions"))
    assert trainer.evaluate(data.select([1]))["eval_reward"] == 1.0


def test_numbers_beside_a_reward_are_logged():
    """Each is a mean over the sessions that gave it, also where parts and sessions give others."""

    async def agent(row, base_url, api_key):
        reward = await tool_agent(row, base_url, api_key, rounds=1)
        more = {"tests_passed": row["number"], "note": "fine", "solved": row["number"] > 2}
        return {"reward": reward, **more, **({"max_depth": 7} if row["number"] == 4 else {})}

    trainer, _ = trained(agent=agent, max_steps=4, generation_parts=2)
    for entry, batch in zip(logs(trainer), range(4), strict=True):
        numbers = [ROWS[row]["number"] for row in trainer.rollouts.prompts.of_batch(batch)]
        assert entry["agent/tests_passed/mean"] == np.mean(numbers)
        assert entry["agent/solved/mean"] == np.mean([number > 2 for number in numbers])
        assert entry.get("agent/max_depth/mean", 7) == 7 and "agent/note/mean" not in entry
    assert any("agent/max_depth/mean" in entry for entry in logs(trainer))
    assert trainer.evaluate(ROWS.select([3]))["eval_agent/tests_passed/mean"] == 3


def test_the_endpoint_may_listen_on_all_addresses():
    seen = []

    async def agent(row, base_url, api_key):
        seen.append(base_url)
        return await tool_agent(row, base_url, api_key)

    trainer, _ = trained(agent=agent, max_steps=1, agent_host="0.0.0.0")
    assert logs(trainer)[0]["agent/failures/raised"] == 0
    assert not any("0.0.0.0" in url for url in seen)
    with pytest.raises(ValueError, match=r"agent_host must be an address of this machine, got '192\.0\.2\.1'"):
        agents(agent_host="192.0.2.1")


def test_a_killed_trainer_takes_its_commands_along(tmp_path):
    """SIGKILL leaves it no time. The command runs a child, and both end; so does what watches them."""
    status, said = ending("tests.trainer.agent_kill_runs", "command", str(new_folder(tmp_path / "run")), "2", "0")
    assert status == -signal.SIGKILL, said
    numbers = [int(each) for file in (tmp_path / "run").glob("*.pid") for each in file.read_text().split()]
    assert len(numbers) >= 2
    for process in numbers:
        line = Path(f"/proc/{process}/cmdline")
        waits_for(lambda line=line: not line.exists() or not line.read_bytes())  # ended, or a zombie


def test_results_are_numbers_of_any_kind():
    results = itertools.cycle([np.float32(2), np.bool_(True), torch.tensor(2.0), {"reward": np.int64(2)}])

    async def agent(row, base_url, api_key):
        await tool_agent(row, base_url, api_key, rounds=1)
        return next(results)

    trainer, _ = trained(agent=agent, max_steps=1)
    assert sorted(trainer._rollout_batch.per_row["scores"].tolist()) == [1.0] * 2 + [2.0] * 6


def test_an_agent_that_blocks_the_others_is_named(monkeypatch, caplog):
    """In each of two steps by its first session."""
    monkeypatch.setattr(deadlines, "BLOCKED_SECONDS", 0.25)
    begun = itertools.count()

    async def blocking(row, base_url, api_key):
        time.sleep(0.0 if next(begun) % 8 else 0.75)
        return await tool_agent(row, base_url, api_key)

    trained(agent=blocking, max_steps=2)
    assert caplog.text.count("One agent blocks all others") == 1 and "in blocking" in caplog.text


async def often_silent(row, base_url, api_key):
    return 1.0 if row["number"] % 2 else await tool_agent(row, base_url, api_key)


def test_parts_of_silent_sessions_have_the_columns_of_others():
    trainer, _ = trained(agent=often_silent, top_p=0.9, generation_parts=2, max_steps=1)
    assert "sampling_kept" in trainer._rollout_batch.per_token


def test_agents_have_their_own_row_and_a_session_until_they_end(tmp_path):
    begun, late, shown = [], [], []

    async def again(client, messages):
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="policy", messages=messages)
        late.append(1)

    async def untidy(row, base_url, api_key):
        begun.append(row)
        is_last = len(begun) == 8
        client, messages = openai.AsyncOpenAI(**connection(base_url, api_key)), row["prompt"]
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        while is_last and len(late) < 7:
            await asyncio.sleep(0.01)
        row["task"] = asyncio.create_task(again(client, messages))
        return float(len(messages))

    def keep(prompts, **_):
        shown.extend(map(len, prompts))
        return [0.0] * len(prompts)

    settings = {"folder": str(tmp_path), "agent_keep_sessions": True, "max_steps": 1}
    data, given = ROWS.to_iterable_dataset(), {"reward_funcs": keep}
    trainer, _ = trained(agent=untidy, data=data, given=given, **settings)
    rows = trainer._rollout_batch.per_row
    assert rows["agent_turns"].tolist() == [1] * 8 and rows["scores"].tolist() == [2.0] * 8
    assert shown == [1] * 8 == [len(record["row"]["prompt"]) for record in read_sessions(tmp_path / "sessions")]


def test_a_budget_cuts_sessions():
    trainer, _ = trained(agent_max_turns=1, max_steps=1)
    assert logs(trainer)[0]["agent/cut_ratio"] == 1
    assert (trainer._rollout_batch.per_row["agent_turns"] == 1).all()


COMMAND = """
import json, os, sys, urllib.request
body = json.dumps({"messages": json.loads(sys.argv[1])["prompt"]}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
with urllib.request.urlopen(urllib.request.Request(sys.argv[2] + "/chat/completions", body, head)) as answer:
    print("said", json.load(answer)["choices"][0]["message"]["content"])
print(json.dumps({"reward": 2.5}))
"""


@pytest.mark.parametrize(("graded", "said"), [(False, "Patch written"), (True, "Patch written"), (True, "[1]")])
def test_a_command_may_print_no_result(graded, said):
    code = COMMAND.replace("print(json.dumps", f"print({said!r}, sys.stdin.read()) or (")
    given = {"reward_funcs": (lambda completions, **_: [1.5] * len(completions)) if graded else None}
    trainer, _ = agents(agent=[sys.executable, "-c", code, "{row}", "{base_url}"], max_steps=1, given=given)
    if not graded:
        with pytest.raises(RuntimeError, match=r"malformed: RewardError: It gave 'Patch written' \(a str\)"):
            trainer.train()
        return
    trainer.train()
    found = logs(trainer)[0]
    assert found["agent/failures/malformed"] == found["agent/failures/raised"] == 0
    assert trainer._rollout_batch.per_row["scores"].tolist() == [1.5] * 8


def test_an_agent_may_be_a_command():
    """A row that is in none of its words is its standard input, of any size. What it starts ends with it."""
    code = COMMAND.replace("json.loads(sys.argv[1])", "json.load(sys.stdin)").replace("argv[2]", "argv[1]")
    child = "__import__('subprocess').Popen(['sleep', '60']).pid"
    data = ROWS.map(lambda row: {"files": "x" * 200_000})
    trainer, _ = trained(agent=[sys.executable, "-c", code.replace("2.5", child), "{base_url}"], max_steps=1, data=data)
    assert logs(trainer)[0]["agent/failures/raised"] == 0
    assert (trainer._rollout_batch.per_row["agent_turns"] == 1).all()
    for process in trainer._rollout_batch.per_row["scores"].tolist():
        line = Path(f"/proc/{process:.0f}/cmdline")
        waits_for(lambda line=line: not line.exists() or not line.read_bytes())  # ended, or a zombie


def test_commands_leave_no_zombies_to_a_trainer_that_is_the_first_process():
    """Of a container: nothing else collects the ends of orphans there."""
    set_subreaper, children = 36, lambda: {each.pid for each in psutil.Process().children()}
    before, system = children(), ctypes.CDLL(None)
    system.prctl(set_subreaper, 1, 0, 0, 0)
    try:
        trained(agent=[sys.executable, "-c", COMMAND, "{row}", "{base_url}"], max_steps=1)
    finally:
        system.prctl(set_subreaper, 0, 0, 0, 0)
    assert children() <= before


@pytest.mark.slow
def test_two_processes(tmp_path):
    settings = {"per_device_train_batch_size": 8, "max_steps": 2, "learning_rate": 0.01}
    trainer, expected = trained(**settings)
    metrics = trainer.evaluate(ROWS.select(range(3)))
    cut = {**settings, "per_device_train_batch_size": 4}
    launch("tests.trainer.grpo_agent_runs", str(tmp_path / "two.pt"), json.dumps(cut))
    found = torch.load(tmp_path / "two.pt")
    for mine, theirs in zip(found["gradients"], expected.steps, strict=True):
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-8, atol=1e-12)
    assert found["logs"][0]["agent/turns"] == logs(trainer)[0]["agent/turns"]
    assert found["eval"]["eval_reward"] == pytest.approx(metrics["eval_reward"])


def synchronous(row, base_url, api_key):
    return 1.0


async def two_arguments(row, base_url):
    return 1.0


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ({"agent": synchronous}, TypeError, "async"),
        ({"agent": two_arguments}, TypeError, "base_url"),
        ({"agent": ""}, FileNotFoundError, "no program ''"),
        ({"agent": "/no/my-agent"}, FileNotFoundError, "no program '/no/my-agent'"),
        ({"agent": 3}, TypeError, "int"),
        ({"agent": tool_agent, "tools": TOOLS}, ValueError, "tools"),
        ({"agent": tool_agent, "rollout_func": lambda prompts, trainer: {}}, ValueError, "rollout_func"),
    ],
)
def test_what_is_no_agent_is_refused(given, error, named):
    with pytest.raises(error, match=named):
        agents(given=given)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ds3_gather_for_generation": False}, "ds3_gather_for_generation"),
        ({"use_vllm": True, "vllm_mode": "colocate"}, "several processes"),
    ],
)
def test_engines_that_processes_share_are_refused(settings, named, monkeypatch):
    shared = VLLMEngine.__new__(VLLMEngine)
    shared._sharing = "a group of processes"
    monkeypatch.setattr(group_setup, "check_vllm", lambda: None)
    monkeypatch.setattr(group_setup, "VLLMEngine", lambda *_, **__: shared)
    with pytest.raises(ValueError, match=named):
        agents(**settings)


def test_a_stopped_run_continues_exactly(tmp_path):
    settings = {"steps_per_generation": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole, _ = trained(agent=forgetful, folder=str(tmp_path), **settings)
    again, _ = agents(agent=forgetful, folder=str(tmp_path), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for mine, theirs in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("kind", "concurrency"),
    [("agent", 1), ("environments", 1), pytest.param("agent", 3, marks=pytest.mark.slow)],
)
def test_a_run_killed_among_its_sessions_does_not_run_those_that_ended_again(kind, concurrency, tmp_path):
    """Batches of 8 sessions: the process is killed in the sixth of the second batch."""
    whole = make_kill_run(kind, str(new_folder(tmp_path / "whole")), concurrency)
    whole.train()
    folder = new_folder(tmp_path / "killed")
    status, said = ending("tests.trainer.agent_kill_runs", kind, str(folder), str(concurrency), "14")
    assert status == -signal.SIGKILL, said
    (journal,) = (folder / "sessions").glob("*.jsonl")
    known = len(list(read_sessions(folder / "sessions")))
    assert journal.name.startswith("00000001-") and journal.name.endswith("-0.jsonl") and 3 <= known <= 5
    with journal.open("a") as file:
        file.write('\n{"key": "torn')
    (folder / "started.txt").write_text("")
    again = make_kill_run(kind, str(folder), concurrency)
    again.train(resume_from_checkpoint=True)
    assert len((folder / "started.txt").read_text().splitlines()) == 2 * 8 - known
    mine, theirs = again._rollout_batch, whole._rollout_batch
    assert torch.equal(mine.completions.values, theirs.completions.values)
    rtol = 0 if concurrency == 1 else 1e-9
    for own, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=rtol, atol=rtol)
    assert not list((folder / "sessions").glob("*.jsonl"))


KEPT = {"save_strategy": "steps", "save_steps": 1, "agent_keep_sessions": True, "learning_rate": 0.0}


@pytest.mark.parametrize(
    ("other_run", "changed", "repeated"),
    [
        (False, {}, 0),
        (False, {"temperature": 0.3}, 8),
        (False, {"agent_max_turns": 7}, 8),
        (False, {"chat_template_kwargs": {"style": "new"}}, 8),
        (False, {"bf16": True}, 8),
        (True, {}, 8),
    ],
)
def test_only_sessions_of_this_run_and_its_settings_are_taken(other_run, changed, repeated, tmp_path, monkeypatch):
    """Resumed after the first of two steps, with the sessions of the second; the weights do not change."""
    versions, finish = set(), Session.finish
    monkeypatch.setattr(
        Session, "finish", lambda self, turn, found: (versions.add(turn.version), finish(self, turn, found))
    )
    settings, started = {**KEPT, "folder": str(tmp_path)}, []

    async def agent(row, base_url, api_key):
        started.append(row)
        return await tool_agent(row, base_url, api_key)

    trained(agent=agent, **settings)
    assert versions == {record["step"] for record in read_sessions(tmp_path / "sessions")} == {0, 1}
    if other_run:
        trained(agent=agent, **settings, max_steps=1)
    started.clear()
    again, _ = agents(agent=agent, **settings, **changed)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(started) == repeated
    keys = [record["key"] for record in _records(tmp_path / "sessions", "*.jsonl")]
    assert len(keys) == len(set(keys)) == 16 + repeated + 8 * other_run
    assert not again.rollouts.completer.journal._held


def test_a_session_belongs_to_the_weights_of_each_process(tmp_path):
    """ZeRO-3 keeps this process's part of a parameter in `ds_tensor`, and nothing in the parameter itself."""
    model, journal, keys = torch.nn.Linear(2, 2), Journal(tmp_path, rank=0), []
    for value in (1.0, 1.0, 2.0):
        model.weight.data, model.weight.ds_tensor = torch.empty(0), torch.full((2,), value)
        with journal.writing(0, model, run="a"):
            keys.append(journal.key(0, {}))
    assert keys[0] == keys[1] != keys[2]


def new_folder(path):
    path.mkdir()
    return path
