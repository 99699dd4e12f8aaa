"""Completions of prompts in the middle of training, which they do not change, and tables of them: of evaluation prompts
(`generate_during_eval`, callbacks)."""

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import pandas as pd
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback

from trl.collators.images import DataCollatorForVisionPreference
from trl.collators.rows import pad_with_mask
from trl.data.formats import is_conversational
from trl.data.prepared_sets import RowSet
from trl.data.rendering import text_tokenizer
from trl.data.templates import maybe_apply_chat_template
from trl.generation.transformers.engine import TransformersEngine
from trl.models.distributed import unwrap_model_for_generation
from trl.models.packed.layout import IGNORED, model_arguments
from trl.models.reference import Reference
from trl.models.switches import holding, undisturbed
from trl.reporting.run_lines import RunLines, print_sample
from trl.reporting.tables import print_rich_table
from trl.reporting.trackers import log_table
from trl.rollouts.maker import Completed, TextCompleter
from trl.trainer.loaders import left_early

logger = logging.getLogger(__name__)

DEFAULT_NEW_TOKENS = 128
TABLE = "game_log"

Row = dict[str, Any]
Inputs = dict[str, Tensor]
"""What `generate` takes for one prompt: `input_ids (1, P)`, and tensors of its images, if it has any."""


class Sample(NamedTuple):
    """A prompt as text, and what the model made of it."""

    prompt: str
    completion: str


def evaluation_rows(trainer: Any, num_prompts: int | None, caller: str) -> list[Row]:
    """The first `num_prompts` rows (all with `None`) of the trainer's evaluation dataset.

    Raises `ValueError` if there is none, for no rows, and for rows of no known kind.
    """
    dataset = trainer.eval_dataset
    if dataset is None or isinstance(dataset, dict):
        number = "none" if dataset is None else f"{len(dataset)} of them"
        raise ValueError(f"{caller} needs one eval_dataset, got {number}. Pass `eval_dataset` to the trainer.")
    rows = list(dataset if num_prompts is None else dataset.take(max(num_prompts, 0)))
    if not rows:
        raise ValueError(f"{caller} needs at least one prompt, got num_prompts={num_prompts} of {dataset}.")
    columns = rows[0].keys()
    if not {"prompt", "prompt_input_ids"} & columns and not {"input_ids", "completion_mask"} <= columns:
        raise ValueError(
            f"{caller} needs a column 'prompt', or 'input_ids' with 'completion_mask', got {sorted(columns)}. Use a "
            "prompt-only or prompt-completion dataset."
        )
    return rows


def prompt_ids(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a row's prompt, rendered up to where the model goes on."""
    if "prompt_input_ids" in row:
        return list(row["prompt_input_ids"])
    if "prompt" not in row:
        return [token for token, mask in zip(row["input_ids"], row["completion_mask"], strict=True) if not mask]
    example = {"prompt": row["prompt"]}
    text = maybe_apply_chat_template(example, tokenizer)["prompt"]
    return tokenizer(text, add_special_tokens=not is_conversational(example))["input_ids"]


def sample_completions(
    trainer: Any,
    rows: Sequence[Row],
    generation_config: GenerationConfig | None,
    *,
    reference: Reference | None = None,
    inputs_of: Callable[[Row], Inputs] | None = None,
    generation_kwargs: dict[str, Any] | None = None,
    seed: int | None = None,
) -> list[Sample]:
    """One completion per row, in order, on every process; the rows are shared out among processes.

    The policy says them, or the `reference`. `inputs_of` makes a row's prompt (default: from its text or tokens);
    `generation_kwargs` change the model's own generation config; `seed` fixes what is sampled.

    The model is in eval mode meanwhile, and the random streams are left as they were, so that sampling or not
    sampling gives the same training.
    """
    tokenizer: Any = text_tokenizer(trainer.processing_class)
    accelerator, batch_size = trainer.accelerator, trainer.args.per_device_eval_batch_size
    share = math.ceil(len(rows) / accelerator.num_processes)
    # Every process gets equally many, or sharded models would wait for each other forever.
    padded = [*rows, *[rows[-1]] * (share * accelerator.num_processes - len(rows))]
    first = accelerator.process_index * share
    make = inputs_of or (lambda row: {"input_ids": torch.tensor([prompt_ids(row, tokenizer)])})
    prompts = [make(row) for row in padded[first : first + share]]
    samples: list[Sample] = []
    wrapped = trainer.model_wrapped
    with (
        undisturbed(wrapped) if reference is None else reference.active(wrapped) as active,
        unwrap_model_for_generation(
            wrapped if reference is None else active,  # type: ignore[arg-type]
            accelerator,
            generation_kwargs=generation_kwargs,
        ) as model,
    ):
        if seed is not None:
            torch.manual_seed(seed + accelerator.process_index)
        for start in range(0, len(prompts), batch_size):
            some = prompts[start : start + batch_size]
            answers = complete(model, tokenizer, some, generation_config)
            samples += [
                Sample(tokenizer.decode(prompt["input_ids"][0]), tokenizer.decode(ids, skip_special_tokens=True))
                for prompt, ids in zip(some, answers, strict=True)
            ]
    return gather_object(samples)[: len(rows)]


@torch.no_grad()
def complete(
    model: Any, tokenizer: Any, prompts: Sequence[Inputs], generation_config: GenerationConfig | None = None
) -> list[list[int]]:
    """Token ids of one completion per prompt: of all prompts at once, or, where they have images, one by one.

    Padding at the end of a completion stays.
    """
    if len(prompts) > 1 and any(len(prompt) > 1 for prompt in prompts):
        return [ids for prompt in prompts for ids in complete(model, tokenizer, [prompt], generation_config)]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids, mask = pad_with_mask([prompt["input_ids"][0] for prompt in prompts], pad, side="left")
    inputs = {**prompts[0], "input_ids": ids, "attention_mask": mask}
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    options: dict[str, Any] = {"pad_token_id": pad}
    if generation_config is not None:
        options["generation_config"] = generation_config
    elif model.generation_config.max_new_tokens is None:
        options["max_new_tokens"] = DEFAULT_NEW_TOKENS
    generated = model.generate(**inputs, **options)
    return generated[:, 0 if model.config.is_encoder_decoder else ids.shape[1] :].tolist()


def generation_settings(trainer: Any, *, longest_prompt: int) -> dict[str, Any]:
    """How evaluation prompts are completed: sampled, up to the trainer's `max_length`, closed by any end token."""
    model, args = trainer.scorer.core, trainer.args
    room = None if args.max_length is None else max(args.max_length - longest_prompt, 1)
    if model.config.is_encoder_decoder:
        room = getattr(args, "max_completion_length", None) or args.max_length
    tokenizer: Any = text_tokenizer(trainer.processing_class)
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return {
        "do_sample": True,
        "max_new_tokens": DEFAULT_NEW_TOKENS if room is None else room,
        "max_length": None,
        "eos_token_id": [token for token in {*ends, tokenizer.eos_token_id} if token is not None],
    }


def log_evaluation_samples(trainer: Any, dataset: RowSet, *, prefix: str = "eval") -> pd.DataFrame | None:
    """Complete a random batch of an evaluation set's prompts, and send the table to the trackers and the terminal.

    Columns: `Prompt`, `Policy` and, with a reference model, `Ref Model`. Prompts and samples depend on seed,
    set and optimiser step alone, and training's random streams are left as they were. The table is called `game_log`,
    with the set's prefix in front where that is not `eval`. All processes must call it; the main one is given the
    table.
    """
    step = trainer.state.global_step
    rows = _some_rows(dataset, trainer.args.per_device_eval_batch_size, key=(trainer.args.seed, prefix, step))
    if not rows:
        return None
    table = _table(trainer, rows, seed=trainer.args.seed + step)
    if not trainer.is_world_process_zero():
        return None
    show_table(trainer, TABLE if prefix == "eval" else f"{prefix}_{TABLE}", table)
    return table


def show_table(trainer: Trainer, name: str, table: pd.DataFrame, *, printed: int | None = None) -> None:
    """Print a table, or its first `printed` rows, and send it to the trackers."""
    print_rich_table(table.iloc[:printed])
    send_table(trainer, name, table)


def send_table(trainer: Any, name: str, table: pd.DataFrame, *, has_all_steps: bool = False) -> list[str]:
    """Send a table to the trackers of the run; returns those that took it. See `log_table`."""
    callbacks, step = trainer.callback_handler.callbacks, trainer.state.global_step
    writer = next((one.tb_writer for one in callbacks if isinstance(one, TensorBoardCallback)), None)
    options: Any = {"step": step, "tensorboard_writer": writer, "has_all_steps": has_all_steps}
    return log_table(name, table, trainer.args.report_to, **options)


def _some_rows(dataset: RowSet, count: int, *, key: tuple) -> list[Row]:
    """Random rows of a stored set; a stream cannot be looked into and gives its first ones."""
    if not isinstance(dataset, Dataset):
        rounds = getattr(dataset, "dataset", dataset)  # within accelerate's part of a process
        return list(islice(iter(getattr(rounds, "stream", rounds)), count))
    draw = random.Random(repr(key))
    return [dataset[index] for index in draw.sample(range(len(dataset)), min(count, len(dataset)))]


def _table(trainer: Any, rows: Sequence[Row], *, seed: int) -> pd.DataFrame:
    tokenizer, collator = text_tokenizer(trainer.processing_class), trainer.data_collator
    if isinstance(collator, DataCollatorForVisionPreference):
        inputs = [illustrated_prompt(collator([row])) for row in rows]
    else:
        inputs = [{"input_ids": torch.tensor([prompt_ids(row, tokenizer)])} for row in rows]
    settings = generation_settings(trainer, longest_prompt=max(row["input_ids"].shape[1] for row in inputs))
    sample = partial(sample_completions, trainer, inputs, None, inputs_of=dict, generation_kwargs=settings, seed=seed)
    policy = sample()
    columns = {"Prompt": [row.prompt for row in policy], "Policy": [row.completion for row in policy]}
    if hasattr(trainer.reference, "active"):
        columns["Ref Model"] = [row.completion for row in sample(reference=trainer.reference)]
    return pd.DataFrame(columns)


def illustrated_prompt(batch: Mapping[str, Tensor]) -> Inputs:
    """The prompt of a batch of one pair with images: its two sequences have the same one, and the same images."""
    end = int((batch["labels"][0] != IGNORED).nonzero()[0])
    shape = batch["input_ids"].shape
    inputs = {**{name: batch[name] for name in ("input_ids", "attention_mask")}, **model_arguments(batch)}
    halves = {name: value[: len(value) // 2] for name, value in inputs.items()}
    return {name: half[:, :end] if inputs[name].shape[:2] == shape else half for name, half in halves.items()}


class SampleTables:
    """Mixin of trainers of rollouts: a table of greedy responses to the evaluation prompts."""

    def generate_completions(self: Any, sampling: bool = False) -> pd.DataFrame | None:
        """Answer evaluation prompts greedily and show them with their scores: `sampling` takes the first batch alone.

        The table (query, model response, score) is printed and sent to the trackers. All processes must call it; the
        main one is given it.
        """
        answered: list[tuple[int, str, str, float]] = []
        sets = self.eval_dataset
        with holding(self, "evaluation_group", 1):  # each prompt once
            loader = self.get_eval_dataloader(next(iter(sets.values())) if isinstance(sets, dict) else sets)
        greedy = replace(self.rollouts.sampling, temperature=0.0)
        with undisturbed(self.model_wrapped), left_early(loader):
            for rows in loader:
                columns = {name: [row[name] for row in rows] for name in rows[0]}
                numbers = columns.pop("row")
                self.rollouts.follow(self.model_wrapped, self.state)
                experience = self.rollouts.complete(columns["input_ids"], streams=numbers, sampling=greedy)
                inputs = self.rollouts.inputs(Completed(experience), columns)
                scores = self.rollouts.rewards.score(inputs).rewards.tolist()
                queries = self._tokenizer.batch_decode(columns["input_ids"], skip_special_tokens=True)
                answers = [ids.tolist() for ids in experience.completions.split()]
                answered += zip(numbers, queries, self._tokenizer.batch_decode(answers), scores, strict=True)
                if sampling:
                    break
        answered = gather_object(answered)
        if not self.is_world_process_zero():
            return None
        unique = {row[0]: row[1:] for row in answered}  # accelerate repeats rows to fill the last batch
        texts = [unique[number] for number in sorted(unique)]
        table = pd.DataFrame(texts, columns=["query", "model response", "score"])
        show_table(self, "completions", table, printed=5)
        return table


class ShowSamples(TrainerCallback):
    """Shows responses `num_sample_generations` times over a run, evenly, at the end of a rollout batch."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """After the last optimiser step of every so many rollout batches."""
        options = self.trainer.args
        batch, rest = divmod(state.global_step, self.trainer.sizes.steps)
        every = max(1, (options.num_total_batches or 1) // options.num_sample_generations)
        if rest == 0 and (batch - 1) % every == 0:
            self.trainer.generate_completions(sampling=True)


def show_sample(trainer: Any, sample: tuple[list[int], list[int]] | None) -> None:
    """Print a finished run's first prompt and completion, and the policy's greedy completion after all steps.

    Only below the table of `RunLines`, for text of the policy itself: a copy would need its weights again.
    """
    engine, model, state = trainer.rollouts.engine, trainer.model_wrapped, trainer.state
    engine = getattr(engine, "policy", engine)
    has_table = any(isinstance(callback, RunLines) for callback in trainer.callback_handler.callbacks)
    is_text = type(engine) is TransformersEngine and isinstance(trainer.rollouts.completer, TextCompleter)
    if sample is None or not (has_table and is_text) or state.global_step < state.max_steps:
        return
    prompt, before = sample
    greedy = replace(trainer.rollouts.sampling, temperature=0.0)
    try:
        # Every process completes its own prompt, as sharded weights need all of them.
        with undisturbed(model), trainer.accelerator.autocast():
            engine.sync_weights(model, state.global_step)
            after = engine.generate([prompt], greedy, streams=[0])[0].ids
        if trainer.is_world_process_zero():
            print_sample(*trainer.rollouts.tokenizer.batch_decode([prompt, before, after], skip_special_tokens=True))
    except Exception as error:  # of a run that is done
        logger.warning("The sample answer after training failed: %s", error)
