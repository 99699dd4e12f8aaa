"""What the PPO examples share: batches for a number of steps, the last line that is printed, and small models for `--tiny`."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any

import torch
from small_model import small_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<end>", "<unk>"
# Settings of `trl.PPOConfig` for a model this small.
TINY: dict[str, Any] = {
    "batch_size": 32, "mini_batch_size": 32, "backward_batch_size": None, "learning_rate": 3e-3, "init_kl_coef": 0.05,
}  # fmt: skip


def batches(loader: Iterable[Any], steps: int) -> Iterator[Any]:
    """As many batches as there are steps, over as many passes as that takes."""
    return islice(chain.from_iterable(repeat(loader)), steps)


def word_tokenizer(words: Iterable[str], marks: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer that knows some words, separated by spaces, and `marks`, which may stand anywhere."""
    every = [PAD, EOS, UNKNOWN, *dict.fromkeys([*words, *marks])]
    model = models.WordLevel({word: number for number, word in enumerate(every)}, unk_token=UNKNOWN)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(list(marks))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN
    )


def word_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> LlamaForCausalLM:
    """One layer, 64 wide, of random weights."""
    return small_llama(tokenizer, seed=seed, layers=1, width=64)


@torch.no_grad()
def sequence_scores(model: Any, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """The one logit that a sequence classifier gives to each text, `(B,)`."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0].cpu()


def report(what: str, means: list[float], kls: list[float]) -> None:
    """Print the mean of a run's first and last steps."""
    few = max(1, len(means) // 5)
    first, last = sum(means[:few]) / few, sum(means[-few:]) / few
    print(f"{what}: {first:.3f} -> {last:.3f} over {len(means)} steps, KL at the end {kls[-1]:.3f} nats")
