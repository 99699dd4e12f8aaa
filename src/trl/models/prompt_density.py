"""BCO's underlying-distribution matching: the probability that a prompt is of a desirable row, from its embedding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

CLASSIFIER_FILE = "prompt_classifier.safetensors"
STREAM_ROWS_PER_SAMPLE = 16  # rows of a stream that are read for each prompt of the sample
EmbeddingFunction = Callable[..., Tensor]
"""(input_ids, attention_mask), `(B, T)` each, by keyword -> embeddings `(B, H)`."""


@dataclass(frozen=True)
class PromptClassifier:
    """Logistic regression on embeddings: `coefficients (H,)` and `intercept ()`, in float64."""

    coefficients: Tensor
    intercept: Tensor

    def probability(self, embeddings: Tensor) -> Tensor:
        """P(desirable | prompt), `(B, H) -> (B,)`, in at least float32. Raises ValueError for another H."""
        if embeddings.ndim != 2 or embeddings.shape[1] != len(self.coefficients):
            raise ValueError(
                f"embeddings must be (B, {len(self.coefficients)}), as fitted, got {tuple(embeddings.shape)}. "
                "Keep embedding_func."
            )
        coefficients, intercept = (x.to(embeddings.device) for x in (self.coefficients, self.intercept))
        logits = embeddings.double() @ coefficients + intercept
        return logits.sigmoid().to(torch.promote_types(embeddings.dtype, torch.float32))


def fit_classifier(desirable: Tensor, undesirable: Tensor) -> PromptClassifier:
    """The classifier between the embeddings of two kinds of prompts, `(N, H)` and `(M, H)`; both kinds weigh the same.

    Deterministic. Source: Jung et al. 2024, BCO, underlying distribution matching (arXiv:2404.04656).
    """
    values = torch.cat([desirable, undesirable]).double().cpu().numpy()
    kinds = np.repeat([1, 0], [len(desirable), len(undesirable)])
    fitted = _logistic_regression()(class_weight="balanced", max_iter=1000).fit(values, kinds)
    return PromptClassifier(torch.from_numpy(fitted.coef_[0].copy()), torch.from_numpy(fitted.intercept_)[0])


def _logistic_regression() -> type:
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ImportError("embedding_func needs scikit-learn. Run `pip install 'trl[bco]'`.") from error
    return LogisticRegression


@dataclass
class PromptDensity:
    """P(desirable | prompt) of a run: embeds a sample of the training prompts, fits the classifier, applies it.

    `embedding_tokenizer` made the rows' `embedding_input_ids`, and pads them. Raises: TypeError or ValueError for a
    missing or unfit function or tokenizer, ImportError without scikit-learn.
    """

    embedding_func: EmbeddingFunction
    embedding_tokenizer: PreTrainedTokenizerBase
    classifier: PromptClassifier | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not callable(self.embedding_func):
            raise TypeError("embedding_func must be a function of input_ids and attention_mask, to (B, H).")
        if getattr(self.embedding_tokenizer, "pad_token_id", None) is None:
            raise ValueError("embedding_func needs an embedding_tokenizer with a pad token. Pass both.")
        _logistic_regression()

    def embed(self, prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
        """Embeddings `(B, H)` of tokenised prompts, padded together.

        Raises: ValueError if embedding_func returns anything else.
        """
        rows = {"input_ids": [list(ids) for ids in prompts]}
        padded = self.embedding_tokenizer.pad(rows, return_tensors="pt").to(device)
        with torch.no_grad():
            embeddings = self.embedding_func(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"])
        shape = tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        if not isinstance(shape, tuple) or shape[:-1] != (len(prompts),):
            raise ValueError(f"embedding_func must return a tensor ({len(prompts)}, H), got {shape}.")
        return embeddings

    def fit(
        self, dataset: Dataset | IterableDataset, *, sample_size: int, seed: int, batch_size: int
    ) -> PromptClassifier:
        """Fit on a sample of at most `sample_size` prompts of each kind, drawn with `seed`; the same on every process.

        `dataset` has `embedding_input_ids` and `label`; of a stream the first rows are taken. Every process embeds its
        share in batches of `batch_size`. Raises: ValueError for a kind without rows, or embeddings not finite.
        """
        sample = sample_prompts(dataset, sample_size=sample_size, seed=seed)
        embeddings = []
        for name, prompts in zip(("desirable", "undesirable"), sample, strict=True):
            if not prompts:
                raise ValueError(f"no {name} prompt, expected at least one of each kind. Add such rows.")
            embeddings.append(self._embed_shared(prompts, batch_size))
            if not (finite := embeddings[-1].isfinite().all(dim=1)).all():
                raise ValueError(
                    f"embedding_func must be finite, unlike for {name} prompt {int((~finite).nonzero()[0])}."
                )
        fitted = [fit_classifier(*embeddings) if PartialState().is_main_process else None]
        self.classifier = broadcast_object_list(fitted)[0]
        assert self.classifier is not None
        return self.classifier

    def _embed_shared(self, prompts: list[list[int]], batch_size: int) -> Tensor:
        """Embeddings of all prompts, each made on one process; short shares are filled up, and cut off after."""
        state = PartialState()
        share = -(-len(prompts) // state.num_processes)
        mine = prompts[state.process_index * share :][:share]
        mine += [prompts[-1]] * (share - len(mine))
        batches = [mine[first : first + batch_size] for first in range(0, share, batch_size)]
        made = torch.cat([self.embed(batch, state.device or "cpu") for batch in batches])
        return gather(made)[: len(prompts)] if state.num_processes > 1 else made  # type: ignore[index]

    def probability(self, prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
        assert self.classifier is not None
        return self.classifier.probability(self.embed(prompts, device))

    def save(self, folder: str | Path) -> None:
        """Write the classifier into a checkpoint, bit for bit (call it on the main process)."""
        assert self.classifier is not None
        save_file(vars(self.classifier), Path(folder) / CLASSIFIER_FILE)

    def load(self, folder: str | Path) -> None:
        """Load the classifier of a checkpoint. Raises FileNotFoundError for a checkpoint of a run without it."""
        path = Path(folder) / CLASSIFIER_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the run had no embedding_func. Start it anew.")
        self.classifier = PromptClassifier(**load_file(path))


def sample_prompts(
    dataset: Dataset | IterableDataset, *, sample_size: int, seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    """`embedding_input_ids` of up to `sample_size` desirable and as many undesirable rows."""
    if isinstance(dataset, IterableDataset):
        dataset = Dataset.from_list(list(dataset.take(STREAM_ROWS_PER_SAMPLE * sample_size)))
    labels = np.asarray(dataset.with_format("numpy")["label"][:])
    random = np.random.default_rng(seed)
    kinds = (np.flatnonzero(labels), np.flatnonzero(~labels))
    chosen = [np.sort(random.permutation(rows)[:sample_size]) for rows in kinds]
    desirable, undesirable = (list(dataset.select(rows)["embedding_input_ids"]) for rows in chosen)
    return desirable, undesirable
