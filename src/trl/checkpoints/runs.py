"""The runs of a trainer: the folder that one owns, the checkpoint that it resumes from, and those that it writes."""

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from torch.distributed import ProcessGroup
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from trl.checkpoints.background import Background
from trl.checkpoints.identity import Facts, compare
from trl.checkpoints.mirror import Mirror, Uploads
from trl.checkpoints.ownership import clear, owned, run_folder_name
from trl.checkpoints.progress import on_main, together
from trl.checkpoints.spread import Spread
from trl.checkpoints.wholeness import (
    CheckpointError,
    checkpoint_to_load,
    checkpoints_in,
    has_weights,
    over_limit,
    publish,
    read_manifest,
    synced_sums,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run: its own folder, what its checkpoints say about it, and the checkpoint that it resumes from."""

    folder: Path
    facts: Facts
    checkpoint: str | None = None
    without: Sequence[str] = ()
    """The parts of the checkpoint that start anew (`resume_without`)."""

    @property
    def step(self) -> int:
        """The optimiser steps that the checkpoint has behind it; 0 for a run that begins."""
        if self.checkpoint is None:
            return 0
        return TrainerState.load_from_json(str(Path(self.checkpoint) / TRAINER_STATE_NAME)).global_step

    @property
    def spreads(self) -> tuple[Spread, Spread] | None:
        """How steps were spread over processes before the checkpoint and are now; None where that is not known."""
        recorded = {} if self.checkpoint is None else read_manifest(Path(self.checkpoint))
        before, now = Spread.of(recorded.get("settings", {})), Spread.of(self.facts.get("settings", {}))
        return None if before is None or now is None else (before, now)


class Runs:
    """The runs of a trainer, one at a time. All processes must make the same calls."""

    current: Run | None = None
    newest_checkpoint: Path | None = None
    """The last checkpoint that the run wrote, else the one that it resumed from."""
    random_state_is_due = False
    """Whether the checkpoint's random state is still to be loaded, once in a run."""
    background: Background | None = None
    """With `async_save` what writes checkpoints beside training."""
    _uploads: Uploads | None = None

    def __init__(self, accelerator: Accelerator, facts: Callable[[], Facts]) -> None:
        """`facts()`: what the checkpoints of a run say about it, when it begins."""
        self._accelerator, self._facts = accelerator, facts

    def enter(
        self, stack: ExitStack, args: TrainingArguments, *, resume: str | bool | None = None,
        alone: bool = True, saves: bool = False,
    ) -> Run:  # fmt: skip
        """Begin a run that lasts as long as `stack`: own its folder, check the checkpoint that it resumes from.

        `alone` refuses other runs in this process; `saves` is for one that saves whatever its `save_strategy`.
        """
        saves = saves or args.save_strategy != SaveStrategy.NO or args.enable_jit_checkpoint
        output_dir = Path(str(args.output_dir))
        folder = self.current.folder if self.current else output_dir / on_main(self._accelerator, run_folder_name)

        def take_folder() -> None:
            if saves and args.should_save:
                stack.enter_context(owned(folder, exclusive=alone))

        together(take_folder)
        stack.callback(setattr, self, "current", self.current)
        url: str | None = getattr(args, "checkpoint_mirror", None)
        mirror = Mirror(url) if url else None

        def begin() -> Run:
            facts = self._facts() if saves or resume else {}
            return _begin_run(folder, facts, args, resume=resume, alone=alone, mirror=mirror)

        self.current = run = on_main(self._accelerator, begin)
        self.newest_checkpoint = None if run.checkpoint is None else Path(run.checkpoint)
        self.random_state_is_due = run.checkpoint is not None and not self.starts_anew("random_state")
        if mirror and saves and self._accelerator.is_main_process:
            self._upload(stack, Uploads(mirror, args.save_total_limit), args)
        if saves and getattr(args, "async_save", False):
            stack.callback(setattr, self, "background", None)
            self.background = Background(args.ddp_timeout)
            stack.push(self.background.close)
        return run

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises: CheckpointError if it could not be."""
        if self.background is not None:
            self.background.wait()

    def _upload(self, stack: ExitStack, uploads: Uploads, args: TrainingArguments) -> None:
        """Upload the checkpoints of a run; the end of `stack` waits for them, then removes what was kept for it."""
        self._uploads, output_dir = uploads, Path(str(args.output_dir))

        def finish() -> None:
            self._uploads = None
            uploads.finish()
            _rotate(output_dir, uploads.newest, uploads.best, args.save_total_limit)

        stack.callback(finish)
        if self.newest_checkpoint is not None and self.newest_checkpoint.parent == output_dir:
            uploads.add(self.newest_checkpoint)

    @property
    def name(self) -> str | None:
        """Of the current run."""
        return None if self.current is None else str(self.current.facts["run"])

    def starts_anew(self, part: str) -> bool:
        """Whether a part of the checkpoint is left out on resuming."""
        return self.current is not None and part in self.current.without

    def holds(self, folder: str | None) -> bool:
        """Whether a folder is a checkpoint that the run is writing."""
        return folder is not None and self.current is not None and Path(folder).parent == self.current.folder

    @contextmanager
    def writing(self, args: TrainingArguments, state: TrainerState) -> Iterator[Path]:
        """The folder to write a checkpoint into; at the end of the block it is renamed into the output directory.

        It is removed where writing fails: an unfinished checkpoint would fill the disk. State that is staged in
        `background` is written after the block, and the checkpoint is renamed when it is there.
        """
        self.wait()
        with ExitStack() as stack:
            run = self.current
            if run is None or "method" not in run.facts:  # no run, or one that was not to save
                run = self.enter(stack, args, saves=True)
            folder = run.folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            try:
                yield folder
            except BaseException:  # as errors of sharded writes are
                if args.should_save:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
            self._publish(folder, args, state)

    def _publish(self, written: Path, args: TrainingArguments, state: TrainerState) -> None:
        """Rename a checkpoint into the output directory, now or when the background has written it."""
        final = Path(str(args.output_dir)) / written.name
        if state.best_global_step:  # the parent looked for the best checkpoint in the run's folder
            best = final.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            state.best_model_checkpoint = str(best) if best == final or best.exists() else None
        if args.should_save:
            state.save_to_json(str(written / TRAINER_STATE_NAME))
        self._accelerator.wait_for_everyone()
        finish = partial(self._finish, written, final, Path(state.best_model_checkpoint or "").name, args)
        if self.background is None:
            finish()
        else:
            self.background.write(written, finish)

    def _finish(
        self, written: Path, final: Path, best: str, args: TrainingArguments, group: ProcessGroup | None = None
    ) -> None:
        """Rename a checkpoint to `final`, then remove what `save_total_limit` no longer allows.

        A rename is atomic on one file system, so a run killed at any moment leaves the checkpoint whole or not at all.
        Raises: CheckpointError where its weights are not there.
        """
        part, parts = self._accelerator.process_index, self._accelerator.num_processes
        sums = together(lambda: synced_sums(written, part=part, parts=parts), group)

        def rename() -> None:
            if not has_weights(written):
                fault = f"{written} has no weights, expected those of step {written.name.rpartition('-')[2]}"
                remedy = "Earlier checkpoints are untouched. Give each run an output_dir of its own"
                raise CheckpointError(f"{fault}: another program removed them. {remedy}.")
            whole = {name: entry for part_sums in sums for name, entry in part_sums.items()}
            assert self.current is not None
            publish(written, final, self.current.facts, replaced=written.parent / "replaced", sums=whole)
            kept = self._uploads.in_progress if self._uploads else None
            _rotate(final.parent, final.name, best, args.save_total_limit, but=kept)
            if self._uploads:
                self._uploads.add(final, best)

        together(rename if args.should_save else lambda: None, group)
        self.newest_checkpoint = final


def _begin_run(
    folder: Path,
    facts: Facts,
    args: TrainingArguments,
    *,
    resume: str | bool | None,
    alone: bool,
    mirror: Mirror | None,
) -> Run:
    """Find and check the checkpoint to resume from, and clear the output directory; for the main process.

    Raises: FileNotFoundError or CheckpointError where the run cannot resume, or must be `alone` and is not.
    """
    output_dir, run = folder.parent, folder.name.rpartition("-")[2]
    clear(output_dir, folder.name, alone=alone)
    without: list[str] = getattr(args, "resume_without", None) or []
    if resume is True and mirror:
        mirror.fetch(output_dir)
    checkpoint = checkpoint_to_load(resume, output_dir, without=without)
    if checkpoint is not None:
        for line in compare(checkpoint, facts, ignore_data=args.ignore_data_skip):
            logger.warning("Resuming with another setting than %s: %s.", checkpoint, line)
        if without:
            logger.warning("resume_without: %s of %s start anew.", " and ".join(without), checkpoint)
        run = read_manifest(checkpoint).get("run")
    saves = folder.is_dir()
    if saves and mirror:
        mirror.check_run(run)
    others = [path for path in checkpoints_in(output_dir) if read_manifest(path).get("run") != run] if saves else []
    if others:
        logger.warning(
            "%s holds checkpoints of another run (%s). This run replaces those of the same step, and save_total_limit "
            "counts and removes them too. Use another output_dir to keep them.",
            output_dir, ", ".join(path.name for path in others),
        )  # fmt: skip
    return Run(folder, {"run": run, **facts}, None if checkpoint is None else str(checkpoint), without)


def _rotate(output_dir: Path, newest: str, best: str, limit: int | None, *, but: Path | None = None) -> None:
    """Remove the checkpoints that are over the limit, without `but`."""
    for name in over_limit([path.name for path in checkpoints_in(output_dir)], newest, best, limit):
        if but is None or name != but.name:
            shutil.rmtree(output_dir / name, ignore_errors=True)
