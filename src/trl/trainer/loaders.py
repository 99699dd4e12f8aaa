"""Data loaders over all processes: whole rounds of batches, rows of like lengths together, each evaluated row once."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import finalize, ref

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderStateMixin, IterableDatasetShard, SeedableRandomSampler
from accelerate.state import GradientState
from datasets import Dataset
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length

from trl.data.prepared_sets import DataSets
from trl.data.ragged import list_lengths
from trl.data.streaming import RepeatedStream, RowStream, StreamRounds, is_streaming
from trl.methods.method import ALONE, Batch
from trl.models.packed.layout import ROLLOUT, STEP_PART
from trl.models.switches import holding
from trl.options.training import TrainingDefaults
from trl.rollouts.experience import Experience
from trl.rollouts.schedule import RolloutSizes
from trl.trainer.grpo_config import RolloutTraining


def prepare_sets(arguments: dict[str, Any]) -> DataSets | None:
    """Take `sets` out of a trainer's arguments, and let them prepare the data.

    Raises: TypeError for a tokenizer in place of the collator.
    """
    collator = arguments.get("data_collator")
    if isinstance(collator, PreTrainedTokenizerBase):  # it can be called, too
        raise TypeError(
            f"data_collator is a tokenizer ({type(collator).__name__}), expected a function that makes batches of "
            "rows. Give a tokenizer as processing_class=."
        )
    sets: DataSets | None = arguments.pop("sets", None)
    if sets is not None:
        for name, prepare in (("train_dataset", sets.train), ("eval_dataset", sets.evaluation)):
            if arguments[name] is not None:
                arguments[name] = prepare(arguments[name])
    return sets


def later(sets: DataSets | None, rows: Any) -> Any:
    """Rows that are given to an evaluation, prepared as those of the constructor if they are not tokenised yet."""
    return rows if sets is None else sets.later(rows)


class GroupedByLength(LengthGroupedSampler):
    """Rows of like lengths side by side, longest first, in groups that are drawn anew in each epoch.

    The parent draws them from the process's random stream, which a run that resumes within an epoch no longer has.
    """

    def __init__(self, rows: int, lengths: list[int], *, seed: int) -> None:
        super().__init__(rows, lengths=lengths)
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw those of this epoch, counted from 0."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return super().__iter__()


def row_lengths(dataset: Dataset, tokens: list[int] | None, column: str) -> list[int]:
    """The lengths of rows: their `column`, their `input_ids`, or `tokens`. Raises: ValueError where none is there."""
    if column in dataset.column_names:
        return list(dataset[column])
    if "input_ids" in dataset.column_names:
        return list_lengths(dataset, "input_ids").tolist()
    if tokens is None:
        raise ValueError(
            "train_sampling_strategy='group_by_length' needs the length of each row: its tokens, or a column "
            f"{column!r}, and prepared rows have {dataset.column_names}. Use 'random'."
        )
    return tokens


class WholeRounds(BatchSampler):
    """Batches in rounds of one for each process; the last round is not filled with rows of the first ones.

    A process without a row in it takes the last batch's first row, which `StepPart.fills_up` marks.
    """

    def __init__(self, batches: BatchSampler, processes: int) -> None:
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        self.missing = 0 if batches.drop_last else -len(batches) % processes

    def __len__(self) -> int:
        return super().__len__() + self.missing

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for batch in super().__iter__():
            yield batch
        yield from [batch[:1]] * self.missing


def in_rounds(loader: DataLoader, args: TrainingDefaults) -> DataLoader:
    """Let accelerate's loader read whole rounds of the parts of `args`, and every row of a part of a `StreamRounds`."""
    shard, stream, processes = loader.batch_sampler, loader.dataset, args.data_processes
    for part in (shard, stream):
        if args.sp_size > 1 and isinstance(part, (BatchSamplerShard, IterableDatasetShard)):
            part.num_processes, part.process_index = processes, args.data_index
    if isinstance(shard, BatchSamplerShard) and type(shard.batch_sampler) is BatchSampler:  # not a program's own
        shard.batch_sampler, shard.even_batches = WholeRounds(shard.batch_sampler, processes), False
    elif isinstance(stream, IterableDatasetShard) and isinstance(stream.dataset, StreamRounds):
        stream.batch_size, stream.num_processes, stream.process_index = 1, 1, 0
    return loader


def _sampler(loader: Any) -> Any:
    """The batch sampler inside accelerate's: a process's part, or what a resumed run has left."""
    batches: Any = getattr(loader, "batch_sampler", None)  # none where a program brings the batches
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return batches


def rounds_of(loader: Any) -> WholeRounds | StreamRounds | None:
    """The rounds that a data loader reads; None for a loader of another program."""
    stream, batches = loader.dataset, _sampler(loader)
    stream = stream.dataset if isinstance(stream, IterableDatasetShard) else stream
    return next((x for x in (stream, batches) if isinstance(x, (WholeRounds, StreamRounds))), None)


def order_of(loader: Any) -> Sampler | None:
    """The order of a data loader's rows; None for a stream."""
    return getattr(_sampler(loader), "sampler", None)


@contextmanager
def left_early(loader: DataLoader) -> Iterator[DataLoader]:
    """A loader that may be left before its end, which accelerate would take for the one that is read afterwards."""
    try:
        yield loader
    finally:
        if isinstance(loader, DataLoaderStateMixin):
            loader.end()


def fills_up(state: GradientState, args: TrainingDefaults) -> bool:
    """Whether the batch that was drawn last is its loader's last one, which has rows for other processes alone."""
    if args.data_processes == 1 or not state.end_of_dataloader:
        return False
    rounds = rounds_of(state.active_dataloader)
    return rounds is not None and args.data_index >= args.data_processes - rounds.missing


def check_lengths(accelerator: Accelerator, dataset: Any, name: str) -> None:
    """Raise ValueError where processes have data sets of different lengths; all processes must call it."""
    if accelerator.num_processes == 1 or not has_length(dataset):
        return
    lengths: Any = accelerator.gather(torch.tensor([len(dataset)], device=accelerator.device))
    if len(lengths.unique()) > 1:
        raise ValueError(
            f"the {name} dataset must be the same in all processes, got {lengths.tolist()} rows. Give each process all "
            "rows: it reads its own part of them."
        )


def on_device(trainer: Trainer, batch: Batch) -> Any:
    """A batch, with its rows of a rollout, on the device; log-probs of others keep their precision under DeepSpeed.

    DeepSpeed casts floats, in `Trainer.training_step` once more: `BaseTrainer.take_batch` puts the `exact` ones back.
    """
    prepared: Any = trainer._prepare_inputs(batch)  # type: ignore[arg-type]
    device = trainer.args.device
    if isinstance(rows := prepared.get(ROLLOUT), Experience):
        prepared[ROLLOUT] = rows.to(device)
    logps = {name: batch[name] for name in batch if name.startswith(("ref_", "teacher_logps"))}
    exact = {name: value.to(device) for name, value in logps.items() if isinstance(value, Tensor)}
    if not exact or not trainer.is_deepspeed_enabled:
        return prepared
    return {**prepared, **exact, STEP_PART: replace(batch.get(STEP_PART, ALONE), exact=exact)}


def order_seed(args: TrainingArguments) -> int:
    """The seed of the order in which rows are visited."""
    return args.seed if args.data_seed is None else args.data_seed


def rounds_loader(make: Callable[..., DataLoader], dataset: Any, trainer: Trainer, *, training: bool) -> DataLoader:
    """The loader of whole rounds by `make`; evaluations read all rows, in order. Workers end with the trainer."""
    args: Any = trainer.args
    held: dict[str, object] = {}
    if not training and is_streaming(dataset):  # hides a length of other rows (ConstantLengthDataset)
        if args.data_processes > 1:  # a worker's copy would know what its last round lacks
            workers = {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
            held = {f"dataloader_{name}": value for name, value in workers.items()}
        dataset = StreamRounds(dataset, args.eval_batch_size, process=args.data_index, processes=args.data_processes)
    held["dataloader_drop_last"] = training and args.dataloader_drop_last
    held["train_sampling_strategy"] = args.train_sampling_strategy if training else "random"
    with ExitStack() as stack:
        for name, value in held.items():
            stack.enter_context(holding(args, name, value))
        loader = in_rounds(make(dataset), args)
    if args.dataloader_persistent_workers:
        finalize(trainer, _end_workers, ref(loader)).atexit = False  # torch has its own way then
    return loader


def _end_workers(reference: Callable[[], Any]) -> None:
    """The garbage collector would end the queues first, and wait 5 s for each worker."""
    if (loader := reference()) is not None:
        getattr(loader, "base_dataloader", loader)._iterator = None


def training_loader(
    make: Callable[..., DataLoader], order: Callable[..., Sampler | None], rows: Any, sets: DataSets | None,
    args: TrainingDefaults,
) -> DataLoader:  # fmt: skip
    """The loader that `make` (`Trainer._get_dataloader`) builds of the training rows; a stream repeats at its end.

    `order` makes the sampler; one of a program's stays with `train_sampling_strategy="group_by_length"` too. Persistent
    workers start from a stream of their own: a run starts them once, and again when it resumes.
    Raises: ValueError without rows, or where `dataloader_drop_last` leaves no batch.
    """
    if rows is None:
        raise ValueError("training needs a train_dataset, got None. Pass it to the trainer.")
    repeats = is_streaming(rows) and not isinstance(rows, RepeatedStream)
    is_inherited = getattr(order, "__func__", None) is Trainer._get_train_sampler
    if args.train_sampling_strategy == "group_by_length" and isinstance(rows, Dataset) and is_inherited:
        lengths = row_lengths(rows, None if sets is None else sets.row_tokens(rows), args.length_column_name)
        step = args.train_batch_size * args.gradient_accumulation_steps * args.data_processes
        order = lambda _: GroupedByLength(step, lengths, seed=order_seed(args))  # noqa: E731
    loader = make(RepeatedStream(rows) if repeats else rows, "Training", args.train_batch_size, order, is_training=True)
    if isinstance(drawn := order_of(loader), SeedableRandomSampler):
        drawn.initial_seed = order_seed(args)  # not that of the process's stream, which a program may have changed
    if args.dataloader_persistent_workers:
        inner: Any = getattr(loader, "base_dataloader", loader)  # accelerate's
        inner.generator = torch.Generator().manual_seed(order_seed(args))
    batches: Any = loader
    dataset: Any = loader.dataset
    if has_length(batches) and not len(batches) and len(dataset):
        raise ValueError(
            f"dataloader_drop_last=True drops all {len(dataset)} training rows: they do not fill a batch of "
            f"{args.train_batch_size * args.data_processes} (over all processes). Set it to False, or lower "
            "per_device_train_batch_size."
        )
    return loader


def loader_of_places(prompts: Dataset | RowStream, sizes: RolloutSizes, args: RolloutTraining) -> DataLoader:
    """The places of the completions of each micro-batch in an epoch; the epoch of a stream is the whole run."""
    if isinstance(prompts, RowStream):
        steps = args.max_steps
    else:
        steps = max(1, round(len(prompts) / sizes.prompts)) * sizes.steps
    rows = args.train_batch_size * args.data_processes
    places: Any = range(steps * sizes.micro_batches * rows)
    return DataLoader(places, batch_size=rows, collate_fn=list, generator=torch.Generator())
