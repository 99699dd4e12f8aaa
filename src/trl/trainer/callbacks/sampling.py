"""Completions of evaluation prompts, sampled in the middle of training without disturbing it."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from transformers import GenerationConfig

from trl.data.formats import is_conversational
from trl.data.templates import maybe_apply_chat_template
from trl.models.distributed import unwrap_model_for_generation

DEFAULT_NEW_TOKENS = 128


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
    if "prompt" not in row:
        return [
            token for token, mask in zip(row["input_ids"], row["completion_mask"], strict=True) if not mask
        ]
    example = {"prompt": row["prompt"]}
    text = maybe_apply_chat_template(example, tokenizer)["prompt"]
    return tokenizer(text, add_special_tokens=not is_conversational(example))["input_ids"]


def sample_completions(
    trainer: Any, rows: Sequence[dict[str, Any]], generation_config: GenerationConfig | None
) -> list[Sample]:
    """One completion per row, in order, on every process; the rows are shared out among processes.

    The model is in eval mode meanwhile, and the random streams are left as they were, so that sampling or not
    sampling gives the same training.
    """
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    accelerator, batch_size = trainer.accelerator, trainer.args.per_device_eval_batch_size
    share = math.ceil(len(rows) / accelerator.num_processes)
    # Every process gets equally many, or sharded models would wait for each other forever.
    padded = [*rows, *[rows[-1]] * (share * accelerator.num_processes - len(rows))]
    first = accelerator.process_index * share
    prompts = [prompt_ids(row, tokenizer) for row in padded[first : first + share]]
    samples: list[Sample] = []
    wrapped = trainer.model_wrapped
    was_training = wrapped.training
    with unwrap_model_for_generation(wrapped, accelerator) as model, _kept_random_state(accelerator.device):
        model.eval()
        try:
            for start in range(0, len(prompts), batch_size):
                samples += _complete(model, tokenizer, prompts[start : start + batch_size], generation_config)
        finally:
            model.train(was_training)
    return gather_object(samples)[: len(rows)] if accelerator.num_processes > 1 else samples


@torch.no_grad()
def _complete(
    model: Any, tokenizer: Any, prompts: list[list[int]], generation_config: GenerationConfig | None
) -> list[Sample]:
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device
    )
    options: dict[str, Any] = {"pad_token_id": pad}
    if generation_config is not None:
        options["generation_config"] = generation_config
    elif model.generation_config.max_new_tokens is None:
        options["max_new_tokens"] = DEFAULT_NEW_TOKENS
    generated = model.generate(input_ids=ids, attention_mask=mask, **options)[:, width:]
    texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
    return [Sample(tokenizer.decode(prompt), text) for prompt, text in zip(prompts, texts, strict=True)]


def _kept_random_state(device: torch.device) -> AbstractContextManager[Any]:
    if device.type in ("cpu", "cuda"):
        return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    return nullcontext()
