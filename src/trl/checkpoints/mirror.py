"""A mirror of checkpoints on another file system (fsspec): uploads in the background, and downloads to resume from.

A checkpoint in the mirror is whole or absent: its manifest is uploaded last and removed first.
"""

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from fsspec.core import url_to_fs

from trl.checkpoints.wholeness import MANIFEST, CheckpointError, faults, in_order, listed, newest_whole, over_limit
from trl.options.checks import Settings
from trl.options.secrets import redacted

logger = logging.getLogger(__name__)

WAIT = 1200.0  # seconds that the end of a run waits for uploads
ARRIVING = "_from-mirror"  # the Hub's uploads leave `_*` out


class Mirror:
    """The checkpoints of a run under a URL."""

    def __init__(self, url: str) -> None:
        """`url`: s3://bucket/folder, file:///folder, …. Raises: ValueError for one that fsspec here cannot open."""
        self._name = redacted(url)
        try:
            self._fs, root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ValueError(f"checkpoint_mirror={self._name!r} cannot be used: {error}.") from error
        self._root = str(root).rstrip("/")

    def __str__(self) -> str:
        return self._name

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the packages of each file system
            raise OSError(f"checkpoint_mirror={self._name!r} cannot be read: {error}.") from error

    def checkpoints(self) -> dict[str, Settings]:
        """The manifests of all checkpoints by name, the highest step first; empty ones of those that are not whole.

        Raises: OSError where the mirror cannot be read.
        """
        with self._reading():
            self._fs.invalidate_cache()
            paths = self._fs.ls(self._root, detail=False) if self._fs.exists(self._root) else []
            names = in_order(PurePosixPath(path).name for path in paths)
            return {name: self._manifest(name) for name in names}

    def _manifest(self, name: str) -> Settings:
        try:
            return json.loads(self._fs.cat_file(f"{self._root}/{name}/{MANIFEST}"))
        except (FileNotFoundError, ValueError):
            return {}

    def check_run(self, run: str | None) -> dict[str, Settings]:
        """`checkpoints`. Raises: CheckpointError where some are of another run."""
        checkpoints = self.checkpoints()
        others = [name for name, manifest in checkpoints.items() if manifest and manifest.get("run") != run]
        if others:
            raise CheckpointError(
                f"checkpoint_mirror={self._name!r} has checkpoints of another run ({', '.join(others)}). Give each run "
                "a mirror of its own, or continue that run with resume_from_checkpoint=true."
            )
        return checkpoints

    def put(self, checkpoint: Path) -> None:
        """Upload a checkpoint that is not there yet. Raises: OSError if it was replaced meanwhile; as `check_run`."""
        written, target = (checkpoint / MANIFEST).read_bytes(), f"{self._root}/{checkpoint.name}"
        manifest = json.loads(written)
        if self.check_run(manifest.get("run")).get(checkpoint.name) == manifest:
            return
        self.remove(checkpoint.name)
        paths = [path for path in sorted(checkpoint.rglob("*")) if path != checkpoint / MANIFEST]
        self._fs.makedirs(target, exist_ok=True)
        self._fs.put([*map(str, paths)], [f"{target}/{path.relative_to(checkpoint).as_posix()}" for path in paths])
        if (checkpoint / MANIFEST).read_bytes() != written:
            raise OSError(f"{checkpoint} was replaced during its upload")
        self._fs.pipe_file(f"{target}/{MANIFEST}", written)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""
        folder = f"{self._root}/{name}"
        for path in (f"{folder}/{MANIFEST}", folder):
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    def rotate(self, newest: str, best: str, limit: int | None) -> None:
        """Remove what `save_total_limit` does not allow, and where there is one also parts of checkpoints."""
        checkpoints = self.checkpoints() if limit and newest else {}
        whole = [name for name, manifest in checkpoints.items() if manifest]
        for name in {*checkpoints} - {*whole} | {*over_limit(whole, newest, best, limit)}:
            self.remove(name)

    def fetch(self, output_dir: Path) -> Path | None:
        """Download the newest whole checkpoint and the best one where `output_dir` has no whole one; the newest.

        They appear under their names with all their files. Raises: OSError where the mirror cannot be read.
        """
        if newest_whole(output_dir, quick=True):
            return None
        arriving, whole = output_dir / ARRIVING, [name for name, manifest in self.checkpoints().items() if manifest]
        try:
            newest = next(filter(None, (self._download(name, arriving) for name in whole)), None)
            if newest is None:
                return None
            state = json.loads((newest / "trainer_state.json").read_text(encoding="utf-8"))
            best = Path(state.get("best_model_checkpoint") or newest).name
            others = [self._download(best, arriving)] if best in whole and best != newest.name else []
            for path in filter(None, (*others, newest)):  # a killed process leaves the best one, or both
                shutil.rmtree(output_dir / path.name, ignore_errors=True)
                path.rename(output_dir / path.name)
            return output_dir / newest.name
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

    def _download(self, name: str, folder: Path) -> Path | None:
        """A whole checkpoint below `folder`; None for one that is damaged."""
        logger.warning("Downloading %s from %s to %s.", name, self, folder.parent)
        shutil.rmtree(folder / name, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        with self._reading():
            self._fs.get(f"{self._root}/{name}", str(folder / name), recursive=True)
        if reasons := faults(folder / name):
            logger.warning("%s in %s is not whole: %s.", name, self, listed(reasons))
        return None if reasons else folder / name


class Uploads:
    """The uploads of a run's checkpoints, one at a time in a thread, the newest first.

    A failed one is a warning, and is tried again with the next checkpoint and at the end of the run.
    """

    in_progress: Path | None = None
    newest = best = ""
    """Names of the last checkpoint that was added, and of the best one: both stay."""

    def __init__(self, mirror: Mirror, limit: int | None) -> None:
        """`limit`: `save_total_limit`."""
        self._mirror, self._limit = mirror, limit
        self._missing: dict[Path, str] = {}  # and why
        self._is_over, self._wake = False, threading.Event()
        self._thread = threading.Thread(target=self._work, name="checkpoint_mirror", daemon=True)
        self._thread.start()

    def add(self, checkpoint: Path, best: str | None = None) -> None:
        """Upload a checkpoint. With `save_total_limit` the `best` stays too; where it is not known (None) all stay."""
        if best is not None:
            self.newest, self.best = checkpoint.name, best
        self._missing[checkpoint] = f"takes longer than {WAIT:g} s"
        self._wake.set()

    def finish(self) -> None:
        """Wait for the uploads, up to `WAIT` seconds. A checkpoint that is not uploaded then is a warning."""
        self._is_over = True
        self._wake.set()
        self._thread.join(WAIT)
        if self._missing:
            why = listed({path.name: reason for path, reason in self._missing.items()})
            logger.warning("Not uploaded to %s: %s. Resuming the run uploads the newest.", self._mirror, why)

    def _work(self) -> None:
        while not self._is_over:
            self._wake.wait()
            self._wake.clear()
            self._upload_missing()
        self._upload_missing()

    def _upload_missing(self) -> None:
        tried: set[Path] = set()
        while left := [path for path in list(self._missing) if path not in tried]:
            self.in_progress = checkpoint = left[-1]
            tried.add(checkpoint)
            try:
                if checkpoint.exists():  # else save_total_limit was faster
                    self._mirror.put(checkpoint)
                self._missing.pop(checkpoint)
            except Exception as error:  # of the packages of each file system
                self._missing[checkpoint] = str(error)
                logger.warning("%s was not uploaded to %s: %s", checkpoint, self._mirror, error)
                continue
            try:
                self._mirror.rotate(self.newest, self.best, self._limit)
            except Exception as error:
                logger.warning("Older checkpoints were not removed from %s: %s", self._mirror, error)
        self.in_progress = None
