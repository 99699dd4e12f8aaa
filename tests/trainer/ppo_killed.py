"""A step-level loop of PPO that kills itself with SIGKILL where it is told to: `python -m tests.trainer.ppo_killed OUT KILL`.

KILL: `generate:N`, `reward:N`, `score:N` within the N-th call of
the process, `micro:N` before the N-th minibatch, `write:N` within the N-th file of a state, `rename:N` behind the N-th renaming.
The loop saves its state after every second step, and goes on from it.
"""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from tests.models.test_step_state import new_trainer
from tests.trainer.resume_worker import digest, kill_while_writing, kill_within
from trl.models import step_state

STEPS, EVERY = 7, 2


def by_chance(responses) -> list[float]:
    """Scores that draw from two of the global random streams; dropout and sampling draw from the third."""
    return [float(np.random.rand()) + random.random() + len(row) for row in responses]


def arm(kill: str, trainer, user) -> None:
    """Let the process die where `kill` says."""
    what, _, number = kill.partition(":")
    places = {
        "generate": (trainer, "generate"), "reward": (user, "reward"), "score": (trainer, "_score_rollout"),
        "micro": (trainer, "train_minibatch"), "rename": (Path, "rename"),
    }  # fmt: skip
    if what == "write":
        kill_while_writing(int(number))
    elif what:
        kill_within(*places[what], int(number), before=what == "micro")


def main(out: str, kill: str = "") -> None:
    torch.set_num_threads(1)
    Path(out).mkdir(exist_ok=True)
    trainer, user, state = new_trainer(), SimpleNamespace(reward=by_chance), Path(out, "state")
    arm(kill, trainer, user)
    if state.exists() or step_state._beside(state, "replaced").exists():
        trainer.load_state(state)
    with open(Path(out, "steps.jsonl"), "a", buffering=1) as log:
        while trainer.current_step < STEPS:
            for batch in trainer.dataloader:
                one_step(trainer, batch, user, log)
                if trainer.current_step % EVERY == 0:
                    trainer.save_state(state)
                if trainer.current_step == STEPS:
                    break
    found = {
        "weights": digest(trainer.model.state_dict()),
        "running": step_state.moments_state(trainer.running),
        "kl_coef": trainer.kl_ctl.value,
        "learning_rate": trainer.lr_scheduler.get_last_lr(),
    }
    Path(out, "end.json").write_text(json.dumps(found))


def one_step(trainer, batch, user, log) -> None:
    responses = trainer.generate(batch["input_ids"], return_prompt=False, do_sample=True, top_k=0, max_new_tokens=5)
    stats = trainer.step(batch["input_ids"], responses, user.reward(responses))
    known = {name: float(value) for name, value in stats.items() if np.size(value) == 1 and "time/" not in name}
    rows = [row.tolist() for row in responses]
    log.write(json.dumps([trainer.current_step, batch["query"], rows, known]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
