"""Whole checkpoints: all files that were written are there and can be read, and nothing that a run needs is missing."""

import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from trl.options.checks import Settings

logger = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
SHARDED_WEIGHTS = "pytorch_model_fsdp_0"  # the folder of accelerate's SHARDED_STATE_DICT
PARTS = {  # what a run can start anew (`resume_without`), and its files; it needs all others
    "optimizer": ("optimizer*", "scheduler.pt"),
    "random_state": ("rng_state*",),
    "progress": ("progress_*", "rollout_*", "bema.*", "replay_buffer.*"),
}
_NOT_READ = (
    "README.md", "training_args.bin", "token*", "special_tokens*", "added_tokens*", "chat_template*", "vocab*",
    "merges*", "*processor*", "generation_config.json", "zero_to_fp32.py",
)  # fmt: skip
_WEIGHTS = ("model*.safetensors*", "*pytorch_model*", "*adapter_model*", "global_step*")
_NEEDED = {  # of every checkpoint; DeepSpeed's optimizer and schedule are in `global_step*`
    "model.safetensors or adapter_model.safetensors": _WEIGHTS, "trainer_state.json": ("trainer_state.json",),
    "optimizer.pt": ("optimizer*", "global_step*"), "scheduler.pt": ("scheduler.pt", "global_step*"),
    "rng_state.pth": ("rng_state*",),
}  # fmt: skip
_READERS = 4  # threads


class CheckpointError(ValueError):
    """A checkpoint, or the folder of a run, that cannot be used."""


Sums = Mapping[str, Sequence[int | str]]
"""The size in bytes and the checksum of files, by their paths from the checkpoint's folder."""


def synced_sums(folder: Path, *, part: int = 0, parts: int = 1, but: Sums | None = None) -> Sums:
    """Flush a finished checkpoint's files to the disk, except those of `but`; the sums of those resuming reads.

    Of `parts` processes each takes every `parts`-th file, from its number, `part`.
    """
    names = [name for name in files_in(folder) if name not in (MANIFEST, *(but or ()))][part::parts]
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(_sync, [folder / name for name in names]))
        read = [name for name in names if not _fits(name, _NOT_READ)]
        return dict(zip(read, pool.map(_sum, [folder / name for name in read]), strict=True))


def publish(
    written: Path, final: Path, facts: Mapping[str, object], *, replaced: Path, sums: Sums | None = None
) -> None:
    """Add the manifest to a finished checkpoint and rename it to `final`, whose older content goes through `replaced`.

    The manifest has `facts` about the run, and the sums of the files that resuming reads; `sums` has those that are
    known. All is flushed to the disk before the rename, so that a power failure leaves no truncated files.
    """
    here = {name: entry for name, entry in (sums or {}).items() if (written / name).is_file()}
    manifest = {"format": 1, **facts, "files": {**here, **synced_sums(written, but=here)}}
    (written / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in (written / MANIFEST, *(path for path in written.rglob("*") if path.is_dir()), written):
        _sync(path)
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    written.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if not path.is_dir():
        with path.open("rb+" if os.name == "nt" else "rb") as file:  # copies of files may be read-only
            os.fsync(file)
    elif os.name != "nt":  # where folders cannot be opened
        handle = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # some network file systems cannot flush folders
            os.fsync(handle)
        os.close(handle)


def _sum(path: Path) -> tuple[int, str]:
    size, content, block = 0, xxhash.xxh3_128(), memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):  # into the same memory, which stays in the processor's cache
            content.update(block[:count])
            size += count
    return size, content.hexdigest()


def read_manifest(folder: Path) -> "Settings":
    """The manifest that `publish` wrote; empty where there is nothing that can be read."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a model's or an adapter's weights."""
    return any(_fits(name, _WEIGHTS) for name in files_in(folder))


def faults(
    folder: Path, *, without: Sequence[str] = (), needed: Mapping[str, Sequence[str]] = _NEEDED, quick: bool = False
) -> dict[str, str]:
    """What keeps a run from resuming, by file, but for `PARTS` in `without`; `quick`: without checksums."""
    names, written = files_in(folder), read_manifest(folder).get("files", {})  # older ones: a list of names
    reasons = {name: "is missing" for name in written if name not in names}
    for file, patterns in needed.items():
        if not any(_fits(name, patterns) for name in [*names, *written]):
            reasons[file] = "is missing"
    read = [name for name in names if not _fits(name, _NOT_READ)]
    sums = written if isinstance(written, dict) and not quick else {}
    with ThreadPoolExecutor(_READERS) as pool:
        whys = pool.map(lambda name: unreadable(folder / name) or _changed(folder / name, sums.get(name)), read)
        reasons |= {name: why for name, why in zip(read, whys, strict=True) if why}
    return {file: why for file, why in reasons.items() if _part_of(file) not in without}


def checkpoints_in(output_dir: str | Path, stem: str = "checkpoint-") -> list[Path]:
    """All `checkpoint-<step>` folders (or of another `stem`), the highest step first."""
    folders = {path.name: path for path in Path(output_dir).glob(f"{stem}*") if path.is_dir()}
    return [folders[name] for name in in_order(folders, stem)]


def in_order(names: Iterable[str], stem: str = "checkpoint-") -> list[str]:
    """Those of `names` that are a checkpoint's, the highest step first."""
    return sorted((name for name in names if re.fullmatch(rf"{stem}\d+", name)), key=_step_of, reverse=True)


def _step_of(name: str) -> int:
    return int(re.split("[-_]", name)[-1])


def over_limit(names: Iterable[str], newest: str, best: str, limit: int | None) -> list[str]:
    """What `save_total_limit` removes: later steps of an earlier run, then the lowest; newest and best stay."""
    if not limit or not newest:
        return []
    others = in_order({*names} - {newest, best})
    others.sort(key=lambda name: _step_of(name) > _step_of(newest))  # else the highest first
    return others[max(limit - len({*names} & {newest, best}), 0) :]


def newest_whole(output_dir: str | Path, *, but: Path | None = None, quick: bool = False) -> Path | None:
    """The whole checkpoint with the highest step, without `but`; None if there is none. `quick` as in `faults`."""
    every = (path for path in checkpoints_in(output_dir) if but is None or path.resolve() != but.resolve())
    return next((path for path in every if not faults(path, quick=quick)), None)


def checkpoint_to_load(
    resume: str | Path | bool | None, output_dir: str | Path, *, without: Sequence[str] = (), quick: bool = False
) -> Path | None:
    """The checkpoint to resume from (True: newest whole). Raises: FileNotFoundError, CheckpointError."""
    if resume is None or resume is False:
        return None
    every = checkpoints_in(output_dir)
    if (resume is True and not every) or (resume is not True and not Path(resume).is_dir()):
        names = ", ".join(map(str, reversed(every)))
        there = f"There are {names}." if every else f"There is none in {output_dir}: leave it out to start anew."
        fault = "needs a checkpoint to resume from" if resume is True else "is no folder"
        raise FileNotFoundError(f"resume_from_checkpoint={resume!r} {fault}. {there}")
    chosen = every if resume is True else [Path(resume)]
    whole = next((path for path in chosen if not faults(path, without=without, quick=quick)), None)
    if whole is None:
        raise _not_whole(chosen[0], without)
    for path in chosen[: chosen.index(whole)]:
        logger.warning("Resuming from %s. %s", whole, _not_whole(path, without))
    return whole


def _not_whole(folder: Path, without: Sequence[str]) -> CheckpointError:
    reasons = faults(folder, without=without)
    parts = list(dict.fromkeys(_part_of(file) for file in reasons))
    another = _another(folder)
    verb = "Or set" if "Resume from" in another else "Set"
    option = "" if "" in parts else f" {verb} resume_without={[*without, *parts]}: these parts start anew."
    return CheckpointError(f"{folder} is not whole: {listed(reasons)}.{another}{option}")


def listed(reasons: Mapping[str, str]) -> str:
    """Faults in one line."""
    return "; ".join(f"{file} {why}" for file, why in reasons.items())


@contextmanager
def naming_weights(folder: str | Path) -> Iterator[None]:
    """Turn an error of loading weights into a CheckpointError that names their files and another whole checkpoint."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:
        files = ", ".join(name for name in files_in(Path(folder)) if _fits(name, _WEIGHTS))
        fault = f"{files} in {folder} cannot be loaded into this model: {error}."
        raise CheckpointError(fault + _another(Path(folder))) from error


def _another(folder: Path) -> str:
    whole = newest_whole(folder.parent, but=folder)
    return f" Resume from {whole}, which is whole." if whole else " There is no other whole checkpoint beside it."


def _part_of(file: str) -> str:
    return next((part for part, patterns in PARTS.items() if _fits(file, patterns)), "")


def files_in(folder: Path) -> list[str]:
    """The paths of all files below a folder, from it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def unreadable(file: Path) -> str | None:
    """Why a file cannot be read as its suffix says, None for one that can; the tensors themselves are not read."""
    try:
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".safetensors":
            with safe_open(file, "np"):
                return None
        elif file.suffix in (".pt", ".pth", ".bin"):
            zipfile.ZipFile(file).close()
    except (ValueError, OSError, SafetensorError, zipfile.BadZipFile) as error:
        return f"cannot be read, it may be truncated ({error})"
    return None


def _changed(file: Path, written: Sequence[int | str] | None) -> str | None:
    """How a file differs from its size and checksum, None where it does not or they are not known."""
    if written is None or (now := _sum(file)) == tuple(written):
        return None
    sizes = f"{now[0]} bytes, {written[0]} were written" if now[0] != written[0] else "by its checksum"
    edited = f"edited (then remove it from 'files' in {MANIFEST})"
    return f"is not as it was written ({sizes}): it is damaged, or was {edited}"
