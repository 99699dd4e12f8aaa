"""A run of GRPO that writes down which sessions it runs: `-m tests.trainer.agent_kill_runs KIND FOLDER CONCURRENCY KILL`.

KIND: an `agent`, `environments` that a reward function reads, or a `command`, which writes the numbers of its processes and waits.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from tests.trainer.grpo_agent_runs import agents, tool_agent

RUN = {}


def begun(number):
    """Write a session down; how many there are."""
    with RUN["started"].open("a") as file:
        file.write(f"{number}\n")
    return len(RUN["started"].read_text().splitlines())


async def agent(row, base_url, api_key):
    count = begun(row["number"])
    reward = await tool_agent(row, base_url, api_key)
    if count == RUN["kill_at"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return reward


class Listener:
    """Keeps the words that it was told."""

    def reset(self, number, **row):
        self.count, self.words = begun(number), []

    def echo(self, word: str) -> str:
        """Says a word again.

        Args:
            word: What to say.
        """
        self.words.append(word)
        return word

    def get_reward(self):
        if self.count == RUN["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.5


def told(environments, completions, **columns):
    return [
        len(each.words) + 0.01 * len(said[0]["content"]) for each, said in zip(environments, completions, strict=True)
    ]


KINDS = {
    "agent": {"agent": agent},
    "environments": {
        "max_completion_length": 16, "given": {"agent": None, "environment_factory": Listener, "reward_funcs": told},
    },
}  # fmt: skip


def make(kind, folder, concurrency, *, kill_at=None):
    """The session `kill_at`, counted over the run, kills the process when it has talked to the policy."""
    RUN.update(started=Path(folder) / "started.txt", kill_at=kill_at)
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "agent_concurrency": concurrency}
    return agents(folder=folder, **settings, **KINDS[kind])[0]


WAITS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "300"])
file = pathlib.Path(sys.argv[1]) / f"{os.getpid()}.part"
file.write_text(f"{os.getpid()} {child.pid}")
file.rename(file.with_suffix(".pid"))
time.sleep(300)
"""


def killed_while_commands_run(folder):
    """Train with commands that never end, and kill the process when they run."""

    def watch():
        while not list(Path(folder).glob("*.pid")):
            time.sleep(0.05)
        if os.fork() == 0:  # as the workers of a reward function, which outlive it
            os.closerange(0, 3)
            time.sleep(25)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    agents(agent=[sys.executable, "-c", WAITS, folder, "{base_url}"], folder=folder, max_steps=1)[0].train()


if __name__ == "__main__":
    from tests.trainer import (
        agent_kill_runs,
    )  # classes of a program's own module have other names in another program

    if sys.argv[1] == "command":
        agent_kill_runs.killed_while_commands_run(sys.argv[2])
    agent_kill_runs.make(sys.argv[1], sys.argv[2], int(sys.argv[3]), kill_at=int(sys.argv[4])).train()
