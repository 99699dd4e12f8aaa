"""Checkpoints of a trainer: what they say about its run, where it resumes, and their pushes to the Hub."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from huggingface_hub import HfApi
from transformers import Trainer
from transformers.trainer_utils import HubStrategy

from trl.checkpoints.identity import run_facts
from trl.checkpoints.progress import SavesState, load_progress, on_main, save_progress
from trl.checkpoints.runs import Run
from trl.checkpoints.wholeness import SHARDED_WEIGHTS, CheckpointError, naming_weights
from trl.models.loading import cast_state, load_checkpoint_weights, name_dtype, save_dtype
from trl.models.parts import causal_core
from trl.models.peft import is_peft_model
from trl.models.switches import holding
from trl.options.secrets import unwritten
from trl.reporting.model_card import card_of_trainer
from trl.trainer.evaluation import check_best_metric
from trl.trainer.loaders import GroupedByLength, order_of

logger = logging.getLogger(__name__)


def facts_of(trainer: Any) -> dict[str, Any]:
    """What checkpoints say about the run of a trainer, as JSON values."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    rows, args, begun = trainer.train_dataset, trainer.args, getattr(trainer._tokenizer, "run_date", None)
    processes = {} if rows is None else {"processes": args.world_size}  # without rows there is nothing to share out
    facts = run_facts(
        method=trainer._name, config=model.config, adapters=getattr(model, "peft_config", {}),
        dataset=rows, settings={**args.to_dict(), **processes},
    )  # fmt: skip
    more = {"date": begun, "rollouts": trainer.rollout_facts(), "workers": args.dataloader_num_workers}
    return {**facts, **{name: value for name, value in more.items() if value}}


def begin_training(trainer: Any) -> None:
    """Forget an earlier run, check what the first evaluation needs, or load the checkpoint, when training begins."""
    trainer.method.load_state({})
    state, run = trainer.state, trainer.runs.current
    if state.global_step == 0:
        check_best_metric(trainer)
    if run is None or run.checkpoint is None:
        return
    trainer.load_progress(Path(run.checkpoint))
    warn_draws(trainer, run)
    loader: Any = trainer.callback_handler.train_dataloader
    order = order_of(loader)
    if isinstance(order, GroupedByLength):  # the parent does not find it where several processes skip seen rows
        order.set_epoch(int(state.epoch or 0))
    if state.global_step >= state.max_steps:  # there is no step before which the parent would load it
        state.num_train_epochs = Trainer.set_initial_training_values(trainer, trainer.args, loader)[0]
        trainer._load_rng_state(run.checkpoint)


def warn_draws(trainer: Any, run: Run) -> None:
    """Warn where random numbers differ from those of a run that was not stopped."""
    spreads = run.spreads
    if spreads is not None and (changed := trainer.changed_draws(*spreads)):
        before, now = spreads
        logger.warning(
            "Resuming %s with micro-batches of %d rows and %d to a process and step, which were of %d and %d: %s "
            "differ from those of a run that was not stopped.",
            run.checkpoint, now.rows, now.micro_batches, before.rows, before.micro_batches, " and ".join(changed),
        )  # fmt: skip


def check_optimizer(trainer: Trainer, folder: str | None) -> None:
    """Raise CheckpointError for an optimiser's state that FSDP wrote, in a run without it, and the other way round."""
    files = set() if folder is None or trainer.is_deepspeed_enabled else set(os.listdir(folder))
    is_plain, is_sharded = "optimizer.pt" in files, bool(files & {"optimizer.bin", "optimizer_0"})
    if is_plain != is_sharded and is_sharded != trainer.is_fsdp_enabled:
        written, now = ("with FSDP", "without") if is_sharded else ("without FSDP", "with")
        raise CheckpointError(
            f"{folder} was written {written}, and this run is {now} it: it cannot read the optimiser's state. Launch "
            "as before, or set resume_without=['optimizer']."
        )


def fsdp_kind(trainer: Trainer) -> str | None:
    """How FSDP writes checkpoints, `FULL_STATE_DICT` or `SHARDED_STATE_DICT`; None for a run without it."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return None if plugin is None else plugin.state_dict_type.name


def check_async_save(trainer: Any) -> None:
    """Raise ValueError where `async_save` cannot write this run's checkpoints."""
    kind = fsdp_kind(trainer)
    version = "" if kind is None else trainer.accelerator.state.fsdp_plugin.fsdp_version
    if trainer.args.async_save and (version, kind) != (2, "SHARDED_STATE_DICT"):
        run = "a run without FSDP" if kind is None else f"FSDP{version} with {kind}"
        raise ValueError(
            f"async_save=True needs FSDP2 with fsdp_state_dict_type: SHARDED_STATE_DICT, got {run}. Launch with both "
            "(--accelerate_config), or leave async_save out."
        )


def staged(trainer: Any) -> AbstractContextManager[object]:
    """A block in which accelerate's sharded state is copied for `async_save` and not yet written.

    accelerate (1.15) writes it by this function, and has no asynchronous save. Remove once it has.
    """
    background = trainer.runs.background
    return nullcontext() if background is None else holding(torch.distributed.checkpoint, "save", background.stage)


def check_weights(trainer: Trainer, folder: str) -> None:
    """Raise CheckpointError for weights that FSDP wrote in another way than this run reads them."""
    files, now = set(os.listdir(folder)), fsdp_kind(trainer)
    kinds = {SHARDED_WEIGHTS: "SHARDED_STATE_DICT", "pytorch_model_fsdp.bin": "FULL_STATE_DICT"}
    written = next((kind for file, kind in kinds.items() if file in files), None)
    if written == now or (written, now) == ("FULL_STATE_DICT", None):  # it has model.safetensors, too
        return
    modes = [f"with FSDP (fsdp_state_dict_type: {kind})" if kind else "without FSDP" for kind in (written, now)]
    merged = f" Or begin a run with its model: first `trl consolidate {folder}`."
    raise CheckpointError(
        f"{folder} was written {modes[0]}, and this run is {modes[1]}: it cannot read the weights. Launch as before."
        f"{merged if written == 'SHARDED_STATE_DICT' else ''}"
    )


def load_weights(
    trainer: Trainer, folder: str, wrapped: Callable[[], None], plain: Callable[[], None] | None = None
) -> None:
    """Load the weights of a checkpoint.

    `wrapped`: how transformers loads adapters, and the weights of FSDP and DeepSpeed. `plain`: how other weights are
    loaded, by default by us.

    Raises: CheckpointError, which names the files, for weights that are incomplete or of another model.
    """
    check_weights(trainer, folder)
    with naming_weights(folder):
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or is_peft_model(trainer.model):
            wrapped()
        elif plain is not None:
            plain()
        else:
            load_checkpoint_weights(trainer.model, Path(folder))  # type: ignore[arg-type]


def save_sharded(trainer: Trainer, folder: Path, *, is_checkpoint: bool) -> None:
    """Write the gathered model where FSDP shards checkpoints; into a checkpoint the model's configs and tokenizer.

    transformers writes none of them with SHARDED_STATE_DICT.
    """
    if fsdp_kind(trainer) != "SHARDED_STATE_DICT":
        return
    if not is_checkpoint:
        state = trainer.accelerator.get_state_dict(trainer.model)
        if trainer.args.should_save:
            trainer._save(str(folder), state_dict=state)  # type: ignore[arg-type]
    elif trainer.args.should_save:
        model = causal_core(trainer.accelerator.unwrap_model(trainer.model))  # type: ignore[arg-type]
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # as `save_pretrained` does
        generation = model.generation_config if model.can_generate() else None
        for part in filter(None, (model.config, generation, trainer.processing_class)):
            part.save_pretrained(folder)  # type: ignore[union-attr]


@contextmanager
def written_model(trainer: Any, folder: str | None, state: dict[str, Any] | None) -> Iterator[dict[str, Any] | None]:
    """A block that writes the model, with its state in `save_dtype`, and the arguments without secrets.

    A checkpoint is written as it is trained, with that dtype in its config.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    args = unwritten(trainer.args)
    dtype = save_dtype(model, getattr(args, "save_dtype", None))
    if dtype is not None and not trainer.runs.holds(folder):
        state = cast_state(model, model.state_dict() if state is None else state, dtype)
    with holding(trainer, "args", args):
        yield state
    if args.should_save:
        name_dtype(folder or str(args.output_dir), dtype)


def write_progress(trainer: Any, folder: Path) -> None:
    """Write into a checkpoint what resuming needs beside weights, optimiser and random state, on every process."""
    tokens, run = trainer._token_counts, trainer.run_metrics.state()
    method = {**trainer.method.state(), **({} if tokens is None else {"tokens": tokens.state()})}
    state = {
        "loss_since_log": trainer._tr_loss.item(), "loss_before_log": trainer._total_loss_scalar,
        "last_logged_step": trainer._globalstep_last_logged, "processes": trainer.args.world_size,
        "copies": trainer.args.sp_size,
        **run, "method": method,
    }  # fmt: skip
    save_progress(folder, rank=trainer.args.process_index, state=state)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, SavesState):
            callback.save_state(folder)
    if trainer._moved_reference is not None:
        trainer._moved_reference.save(str(folder))


def name_checkpoint(callbacks: Sequence[object], checkpoint: str | None) -> None:
    """Say to callbacks with state which checkpoint the run resumes from."""
    for callback in callbacks:
        if isinstance(callback, SavesState):
            callback.resumed_from = checkpoint


def read_progress(trainer: Any, folder: Path) -> None:
    """Load what `write_progress` wrote."""
    if trainer._moved_reference is not None:
        trainer._moved_reference.load(str(folder))
    state = None
    if not trainer.runs.starts_anew("progress"):
        args = trainer.args
        state = load_progress(folder, rank=args.process_index, processes=args.world_size, copies=args.sp_size)
    if state is None:
        trainer.run_metrics.uncounted_steps = trainer.state.global_step
        return
    trainer.run_metrics.load_state(state)
    trainer._tr_loss.fill_(state["loss_since_log"])
    trainer._total_loss_scalar = state["loss_before_log"]
    trainer._globalstep_last_logged = state["last_logged_step"]
    method = state.get("method", {})
    trainer.method.load_state(method)
    if trainer._token_counts is not None:
        trainer._token_counts.load_state(method.get("tokens", {}))


def write_card(trainer: Any, folder: Path, **facts: Any) -> None:
    """Write the model card of the run into a folder, on the main process."""
    if trainer.is_world_process_zero():
        folder.mkdir(parents=True, exist_ok=True)
        card_of_trainer(trainer, **facts).save(folder / "README.md")


def remaining(values: Sequence[Any], run: Run | None) -> tuple[Any, ...]:
    """The lengths of a run (`Trainer.set_initial_training_values`); no epoch is left after its last checkpoint.

    There transformers would train one more step.
    """
    epochs, updates, *_, max_steps = values
    done = 0 if run is None else run.step
    return (epochs if done < max_steps else min(epochs, done // updates), *values[1:])


def push(trainer: Any) -> None:
    """Push the model, and with it the newest checkpoint, as `hub_strategy` says; not during an earlier push."""
    args, strategy = unwritten(trainer.args), trainer.args.hub_strategy
    earlier = None if args.hub_always_push else trainer.push_in_progress
    # The files of `output_dir` must stay as they are while the main process pushes an earlier model.
    if strategy == HubStrategy.END or on_main(
        trainer.accelerator, lambda: earlier is not None and not earlier.is_done()
    ):
        return
    # In `save_dtype`: a checkpoint's weights, which the parent would copy, are those that train.
    trainer.save_model(_internal_call=True)
    args.hub_strategy = HubStrategy.EVERY_SAVE
    with holding(trainer, "args", args):
        trainer._push_from_checkpoint(os.devnull)
    if strategy not in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        return
    trainer.runs.wait()
    checkpoint = trainer.runs.newest_checkpoint
    assert checkpoint is not None
    if trainer.is_world_process_zero():
        upload = HfApi().upload_folder(
            repo_id=str(trainer.hub_model_id), folder_path=checkpoint, token=args.hub_token,
            path_in_repo="last-checkpoint" if strategy == HubStrategy.CHECKPOINT else checkpoint.name,
            commit_message=f"Training in progress, step {trainer.state.global_step}, checkpoint",
            run_as_future=True, revision=args.hub_revision,
        )  # fmt: skip
        trainer.push_in_progress.jobs.append(upload)  # type: ignore[union-attr]
