"""SFT in two processes with checkpoints, resumed in the same folder: `torchrun -m tests.trainer.run_worker FOLDER`."""

import sys
from pathlib import Path

from tests.trainer.sft_runs import make
from trl.checkpoints.ownership import PREFIX

ROWS = [{"input_ids": list(range(3, 3 + n))} for n in (5, 9, 4, 7, 8, 6, 5, 7)]


def main(folder: str) -> None:
    for steps, resume in ((2, False), (4, True)):
        trainer = make(ROWS, folder=folder, max_steps=steps, save_strategy="steps", save_steps=1, ddp_backend="gloo")
        seen, step = set(), trainer.training_step

        def training_step(*args, seen=seen, step=step):
            seen.update(path.name for path in Path(folder).glob(f"{PREFIX}*"))
            return step(*args)

        trainer.training_step = training_step
        trainer.train(resume_from_checkpoint=resume)
        assert len(seen) == 1, seen
        assert trainer.state.global_step == steps


if __name__ == "__main__":
    main(sys.argv[1])
