"""A run of GRPO with an agent that writes down which sessions it runs: `-m tests.trainer.agent_kill_runs FOLDER CONCURRENCY KILL`."""

import os
import signal
import sys
from pathlib import Path

from tests.trainer.grpo_agent_runs import agents, tool_agent


def make(folder, concurrency, *, kill_at=None):
    """The session `kill_at`, counted over the run, kills the process when it has talked to the policy."""
    started = Path(folder) / "started.txt"

    async def agent(row, base_url, api_key):
        with started.open("a") as file:
            file.write(f"{row['number']}\n")
        count = len(started.read_text().splitlines())
        reward = await tool_agent(row, base_url, api_key)
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return reward

    trainer, _ = agents(
        agent=agent, folder=folder, save_strategy="steps", save_steps=1, max_steps=3, agent_concurrency=concurrency
    )  # fmt: skip
    return trainer


if __name__ == "__main__":
    make(sys.argv[1], int(sys.argv[2]), kill_at=int(sys.argv[3])).train()
