"""KTO and BCO on eight fixed rows, with a reference that is not the policy."""

from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_model
from tests.trainer.dpo_runs import make_any
from tests.trainer.resume_worker import tokenizer
from trl.trainer.bco_config import BCOConfig
from trl.trainer.bco_trainer import BCOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

# Lengths of prompt and completion, one-token ones among them, and which are desirable.
LENGTHS = ((4, 3), (2, 5), (7, 1), (3, 8), (5, 5), (1, 2), (6, 4), (2, 9))
LABELS = (True, False, True, True, False, True, False, False)


def rows(seed: int = 2, count: int = len(LENGTHS)) -> list[dict[str, Any]]:
    """Tokenised rows of fixed lengths."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        prompt, completion = (
            torch.randint(3, 60, (n,), generator=generator).tolist() for n in LENGTHS[index % len(LENGTHS)]
        )
        label = LABELS[index % len(LABELS)]
        found.append({"prompt_input_ids": prompt, "completion_input_ids": completion, "label": label})
    return found


def make(out: str | None = None, **settings: Any) -> KTOTrainer:
    """A KTO trainer; `settings` are those of its config, and its arguments by name."""
    return make_any((KTOTrainer, KTOConfig), rows(), out, settings)


PROMPTS = ((5, 9), (50, 51, 52), (7,), (6, 40), (55, 44), (8, 9, 10), (20, 30), (58,))  # for the embedding


def embed(*, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Two numbers for each prompt: the mean token id, and the mean of its square, scaled."""
    mask = attention_mask.double()
    scaled = input_ids.double() / 60
    return torch.stack([(scaled**power * mask).sum(1) / mask.sum(1) for power in (1, 2)], dim=1)


def embedded_rows() -> list[dict[str, Any]]:
    """The rows with prompts under the embedding tokenizer; desirable ones have lower token ids, mostly."""
    return [{**row, "embedding_input_ids": list(ids)} for row, ids in zip(rows(), PROMPTS, strict=True)]


def make_bco(out: str | None = None, *, matched: bool = False, **settings: Any) -> BCOTrainer:
    """A BCO trainer, on request with underlying-distribution matching."""
    settings.pop("prefix_sharing", None)  # one completion behind its prompt has nothing to share
    if matched:
        settings = {"embedding_func": embed, "embedding_tokenizer": tokenizer(), **settings}
        settings.setdefault("train_dataset", Dataset.from_list(embedded_rows()))
    return make_any((BCOTrainer, BCOConfig), rows(), out, settings)


MATCHED = {"matched": True, "beta": 0.3}


def logps(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-prob of a completion behind its prompt, 0-dim: one plain call of the model, without batch or padding."""
    ids = torch.tensor([prompt + completion])
    found = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return found[len(prompt) - 1 :].sum()


def log_ratios(model: Any, reference: Any, given: list[dict[str, Any]], shift: int = 0) -> torch.Tensor:
    """Log-ratio of policy over reference of each row's completion, or of that `shift` rows before it, in a ring."""
    prompts = [row["prompt_input_ids"] for row in given]
    completions = [given[index - shift]["completion_input_ids"] for index in range(len(given))]
    each = list(zip(prompts, completions, strict=True))
    policy = torch.stack([logps(model, *pair) for pair in each])
    return policy - torch.stack([logps(reference, *pair).detach() for pair in each])


SPLITS = {
    "2x4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "4x2": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "8x1": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
}


def learned(make_trainer: Any, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of unseen rows before and after a short run: completions of low tokens are desirable, of high ones not."""
    generator = torch.Generator().manual_seed(seed)

    def data(count: int) -> Dataset:
        found = []
        for index in range(count):
            low = index % 2 == 0
            ids = torch.randint(3 if low else 32, 32 if low else 60, (5,), generator=generator).tolist()
            prompt = torch.randint(3, 60, (3,), generator=generator).tolist()
            found.append({"prompt_input_ids": prompt, "completion_input_ids": ids, "label": low})
        return Dataset.from_list(found)

    trainer = make_trainer(
        model=tiny_model("llama"), train_dataset=data(64), eval_dataset=data(16), max_steps=40, learning_rate=3e-3,
        optim="adamw_torch", beta=0.5, seed=seed,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    return before, trainer.evaluate()
