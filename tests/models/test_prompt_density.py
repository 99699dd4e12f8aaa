"""BCO's prompt classifier: scikit-learn's numbers, the same bits after a checkpoint and on every process."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from tests.tiny_tokenizers import tiny_tokenizer
from tests.two_processes import launch
from trl.models.prompt_density import (
    CLASSIFIER_FILE,
    PromptClassifier,
    PromptDensity,
    fit_classifier,
    sample_prompts,
)

SIZE = 6


def mean_of_ids(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Some function of the real tokens of each prompt, `(B, 6)`."""
    waves = torch.sin(input_ids.double()[..., None] * torch.arange(1, SIZE + 1))
    mask = attention_mask.double()[..., None]
    return (waves * mask).sum(dim=1) / mask.sum(dim=1)


def rows(count: int = 20) -> Dataset:
    """Prompts of 1 to 5 tokens; those of undesirable rows (one in four) have larger ids."""
    random = np.random.default_rng(0)
    labels = [index % 4 != 3 for index in range(count)]
    prompts = [
        random.integers(10 if good else 60, 100, size=1 + index % 5).tolist() for index, good in enumerate(labels)
    ]
    return Dataset.from_dict({"embedding_input_ids": prompts, "label": labels})


def density(**changes: Any) -> PromptDensity:
    return PromptDensity(**({"embedding_func": mean_of_ids, "embedding_tokenizer": tiny_tokenizer()} | changes))


def test_probabilities_are_those_of_scikit_learn() -> None:
    data = rows()
    ours = density()
    ours.fit(data, sample_size=100, seed=0, batch_size=7)
    prompts, labels = list(data["embedding_input_ids"]), np.array(data["label"])
    embeddings = torch.cat([ours.embed([prompt]) for prompt in prompts])
    ordered = np.concatenate([embeddings[labels], embeddings[~labels]])
    theirs = LogisticRegression(class_weight="balanced", max_iter=1000).fit(ordered, [1] * 15 + [0] * 5)
    expected = theirs.predict_proba(embeddings.numpy())[:, 1]
    np.testing.assert_allclose(ours.probability(prompts).numpy(), expected, atol=1e-12)


def test_a_kind_that_is_rare_weighs_as_much() -> None:
    """With the same embedding everywhere nothing can be told: one half, whatever the counts are."""
    classifier = fit_classifier(torch.ones(30, 2), torch.ones(3, 2))
    assert classifier.probability(torch.ones(1, 2)).item() == pytest.approx(0.5, abs=1e-6)


def test_worked_example() -> None:
    classifier = PromptClassifier(
        torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    )
    found = classifier.probability(torch.tensor([[1.0, 0.75], [2.0, 0.0]], dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([0.5, 0.9241418]), atol=1e-7, rtol=0)


def test_padding_does_not_change_a_probability() -> None:
    ours = density()
    ours.fit(rows(), sample_size=100, seed=0, batch_size=4)
    together = ours.probability([[20], [30, 40, 50, 60]])
    alone = torch.cat([ours.probability([prompt]) for prompt in ([20], [30, 40, 50, 60])])
    torch.testing.assert_close(together, alone, atol=1e-14, rtol=0)


def test_a_checkpoint_keeps_every_bit(tmp_path: Path) -> None:
    ours, resumed = density(), density()
    ours.fit(rows(), sample_size=100, seed=0, batch_size=4)
    ours.save(tmp_path)
    resumed.load(tmp_path)
    prompts = list(rows()["embedding_input_ids"])
    assert torch.equal(ours.probability(prompts), resumed.probability(prompts))
    with pytest.raises(FileNotFoundError, match=f"{CLASSIFIER_FILE} is missing"):
        resumed.load(tmp_path / "elsewhere")


def test_the_sample_is_drawn_once_per_seed_and_of_both_kinds() -> None:
    data = rows(200)
    first = sample_prompts(data, sample_size=30, seed=1)
    assert [len(kind) for kind in first] == [30, 30]
    assert first == sample_prompts(data, sample_size=30, seed=1)
    assert first != sample_prompts(data, sample_size=30, seed=2)
    everything = sample_prompts(data, sample_size=1000, seed=1)
    assert [len(kind) for kind in everything] == [150, 50]
    assert everything[0] == [row["embedding_input_ids"] for row in data if row["label"]]
    assert all(prompt in everything[1] for prompt in first[1])


def test_of_a_stream_the_first_rows_are_taken() -> None:
    data = rows(200)
    sample = sample_prompts(data.to_iterable_dataset(), sample_size=2, seed=0)
    assert sample == sample_prompts(data.select(range(32)), sample_size=2, seed=0)


def test_two_processes_fit_the_classifier_of_one(tmp_path: Path) -> None:
    launch("tests.models.test_prompt_density", str(tmp_path))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert torch.equal(found[0], found[1])
    alone = density().fit(rows(), sample_size=100, seed=0, batch_size=4)
    torch.testing.assert_close(found[0][:-1], alone.coefficients, atol=1e-9, rtol=0)
    torch.testing.assert_close(found[0][-1], alone.intercept, atol=1e-9, rtol=0)


def constant(value: Any) -> Any:
    return lambda input_ids, attention_mask: value


BAD = {
    "no function": ({"embedding_func": 3}, TypeError, "embedding_func must be a function"),
    "no pad token": (
        {"embedding_tokenizer": tiny_tokenizer(pad_token=None)},
        ValueError,
        "embedding_tokenizer with a pad token",
    ),
    "not a tensor": ({"embedding_func": constant([1])}, ValueError, "embedding_func .*got list"),
    "not pooled": (
        {"embedding_func": constant(torch.zeros(4, 2, 3))},
        ValueError,
        r"embedding_func .*\(4, H\), got \(4, 2, 3\)",
    ),
    "not finite": (
        {"embedding_func": lambda input_ids, attention_mask: torch.full((len(input_ids), 2), torch.nan)},
        ValueError,
        "embedding_func must be finite, unlike for desirable prompt 0",
    ),
}


@pytest.mark.parametrize(("changes", "error", "says"), BAD.values(), ids=BAD)
def test_what_cannot_work_is_said(changes: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        density(**changes).fit(rows(), sample_size=100, seed=0, batch_size=4)


def test_data_that_cannot_be_told_apart_is_refused() -> None:
    only = rows().filter(lambda row: row["label"])
    with pytest.raises(ValueError, match="no undesirable prompt, expected at least one of each kind"):
        density().fit(only, sample_size=10, seed=0, batch_size=4)
    with pytest.raises(ValueError, match=r"embeddings must be \(B, 2\), as fitted, got \(1, 3\)"):
        fit_classifier(torch.ones(1, 2), torch.zeros(1, 2)).probability(torch.zeros(1, 3))


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ImportError, match=r"pip install 'trl\[bco\]'"):
        density()


def worker(folder: str) -> None:
    """One of two processes: fit, and write down what this rank has."""
    from accelerate import PartialState

    state = PartialState(cpu=True)
    fitted = density().fit(rows(), sample_size=100, seed=0, batch_size=4)
    torch.save(torch.cat([fitted.coefficients, fitted.intercept.reshape(1)]), f"{folder}/{state.process_index}.pt")
    state.destroy_process_group()


if __name__ == "__main__":
    worker(sys.argv[1])
