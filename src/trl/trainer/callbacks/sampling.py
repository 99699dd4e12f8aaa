"""Completions of evaluation prompts, sampled in the middle of training without disturbing it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import GenerationConfig
from transformers.integrations import TensorBoardCallback

from trl.data.formats import is_conversational
from trl.data.rendering import text_tokenizer
from trl.data.templates import maybe_apply_chat_template
from trl.models.distributed import unwrap_model_for_generation
from trl.models.switches import undisturbed

DEFAULT_NEW_TOKENS = 128

Inputs = dict[str, Tensor]
"""What `generate` takes for one prompt: `input_ids (1, P)`, and tensors of its images, if it has any."""


class Sample(NamedTuple):
    """A prompt as text, and what the model made of it."""

    prompt: str
    completion: str


def evaluation_rows(trainer: Any, num_prompts: int | None, caller: str) -> list[dict[str, Any]]:
    """The first `num_prompts` rows (all with `None`) of the trainer's evaluation dataset.

    Raises `ValueError` if there is none, or rows of no known kind.
    """
    dataset = trainer.eval_dataset
    if dataset is None or isinstance(dataset, dict):
        given = "none" if dataset is None else f"{len(dataset)} of them"
        raise ValueError(f"{caller} needs one eval_dataset, got {given}. Pass `eval_dataset` to the trainer.")
    rows = list(dataset if num_prompts is None else dataset.take(num_prompts))
    for row in rows[:1]:
        if "prompt" not in row and not {"input_ids", "completion_mask"} <= row.keys():
            raise ValueError(
                f"{caller} needs a column 'prompt', or 'input_ids' with 'completion_mask', got {sorted(row)}. Use a "
                "prompt-only or prompt-completion dataset."
            )
    return rows


def prompt_ids(row: dict[str, Any], tokenizer: Any) -> list[int]:
    """Token ids of a row's prompt, rendered up to where the model goes on."""
    if "prompt_input_ids" in row:
        return list(row["prompt_input_ids"])
    if "prompt" not in row:
        return [
            token for token, mask in zip(row["input_ids"], row["completion_mask"], strict=True) if not mask
        ]
    example = {"prompt": row["prompt"]}
    text = maybe_apply_chat_template(example, tokenizer)["prompt"]
    return tokenizer(text, add_special_tokens=not is_conversational(example))["input_ids"]


def sample_completions(
    trainer: Any,
    rows: Sequence[dict[str, Any]],
    generation_config: GenerationConfig | None,
    *,
    reference: Any = None,
    inputs_of: Callable[[dict[str, Any]], Inputs] | None = None,
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
    with generating_model(trainer, reference, generation_kwargs) as model:
        if seed is not None:
            torch.manual_seed(seed + accelerator.process_index)
        for start in range(0, len(prompts), batch_size):
            some = prompts[start : start + batch_size]
            found = complete(model, tokenizer, some, generation_config)
            samples += [
                Sample(
                    tokenizer.decode(prompt["input_ids"][0]), tokenizer.decode(ids, skip_special_tokens=True)
                )
                for prompt, ids in zip(some, found, strict=True)
            ]
    return gather_object(samples)[: len(rows)] if accelerator.num_processes > 1 else samples


@contextmanager
def generating_model(
    trainer: Any, reference: Any = None, generation_kwargs: dict[str, Any] | None = None
) -> Iterator[Any]:
    """The trainer's policy, or its `reference`, without wrapper, in eval mode; it and the random streams are put back."""
    wrapped, accelerator = trainer.model_wrapped, trainer.accelerator
    with undisturbed(wrapped) if reference is None else reference.active(wrapped) as active:
        chosen: Any = wrapped if reference is None else active
        with unwrap_model_for_generation(chosen, accelerator, generation_kwargs=generation_kwargs) as model:
            yield model


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
    width = max(prompt["input_ids"].shape[1] for prompt in prompts)
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        own = prompt["input_ids"][0]
        ids[row, width - len(own) :], mask[row, width - len(own) :] = own, 1
    inputs = {**prompts[0], "input_ids": ids, "attention_mask": mask}
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    options: dict[str, Any] = {"pad_token_id": pad}
    if generation_config is not None:
        options["generation_config"] = generation_config
    elif model.generation_config.max_new_tokens is None:
        options["max_new_tokens"] = DEFAULT_NEW_TOKENS
    generated = model.generate(**inputs, **options)
    return generated[:, 0 if model.config.is_encoder_decoder else width :].tolist()


def tensorboard_writer(trainer: Any) -> Any | None:
    """The writer of the trainer's TensorBoard callback, None without one."""
    callbacks = trainer.callback_handler.callbacks
    return next((c.tb_writer for c in callbacks if isinstance(c, TensorBoardCallback)), None)


def generation_settings(trainer: Any, *, longest_prompt: int) -> dict[str, Any]:
    """How evaluation prompts are completed: sampled, up to the trainer's `max_length`, closed by any end token."""
    model, args = trainer.scorer.core, trainer.args
    room = None if args.max_length is None else max(args.max_length - longest_prompt, 1)
    if model.config.is_encoder_decoder:
        room = getattr(args, "max_completion_length", None) or args.max_length
    tokenizer: Any = text_tokenizer(trainer.processing_class)
    own = getattr(model.generation_config, "eos_token_id", None)
    ends = own if isinstance(own, list) else [own]
    return {
        "do_sample": True,
        "max_new_tokens": DEFAULT_NEW_TOKENS if room is None else room,
        "max_length": None,
        "eos_token_id": [token for token in {*ends, tokenizer.eos_token_id} if token is not None],
    }
