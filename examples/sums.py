"""Sums as conversations, with a tokenizer and a model of half a million weights: the task of `arithmetic_rl.py`."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine

Message = dict[str, str]

LARGEST_SUM, HELD_OUT = 99, 300
MAX_ANSWER_TOKENS, MAX_POSITIONS = 8, 256
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
ROLES = ("system\n", "user\n", "assistant\n")
PHRASINGS = (
    "What is {left} + {right}?",
    "Compute {left} + {right}.",
    "How much is {left} + {right}?",
    "Please work out {left} + {right}.",
    "Calculate {left} + {right}.",
    "Tell me {left} + {right}.",
)
# ChatML; the newline between two turns belongs to the later one, so that a reply ends with its stop token.
TEMPLATE = """\
{%- for message in messages %}
    {{- ('' if loop.first else '\\n') + '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- ('\\n' if messages else '') + '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum, and the number of its phrasing."""

    left: int
    right: int
    phrasing: int = 0

    @property
    def prompt(self) -> list[Message]:
        """The question as a conversation."""
        return [{"role": "user", "content": PHRASINGS[self.phrasing].format(left=self.left, right=self.right)}]

    @property
    def answer(self) -> str:
        """The right answer."""
        return str(self.left + self.right)


@dataclass(frozen=True)
class Task:
    """Problems to train on and held-out ones; no held-out sum is trained on in any order or phrasing."""

    problems: tuple[Problem, ...]
    held_out: tuple[Problem, ...]

    def conversations(self) -> list[dict[str, Any]]:
        """Rows for `SFTTrainer`."""
        return [
            {"messages": [*problem.prompt, {"role": "assistant", "content": problem.answer}]}
            for problem in self.problems
        ]

    def prompts(self) -> list[dict[str, Any]]:
        """Rows for `GRPOTrainer` and `RLOOTrainer`, with the answers that `is_right` compares."""
        return [{"prompt": problem.prompt, "answer": problem.answer} for problem in self.problems]


def make_task(*, largest_sum: int = LARGEST_SUM, held_out: int = HELD_OUT, seed: int) -> Task:
    """All sums of two numbers up to `largest_sum`, `held_out` of them kept for evaluation; `seed` shuffles."""
    draw = random.Random(seed)
    keys = [(left, right) for left in range(largest_sum + 1) for right in range(left, largest_sum - left + 1)]
    draw.shuffle(keys)
    kept = [_phrased(draw, *draw.sample(key, 2)) for key in keys[:held_out]]
    orders = [order for key in keys[held_out:] for order in sorted({key, key[::-1]})]
    train = [_phrased(draw, *order) for order in orders]
    draw.shuffle(train)
    return Task(problems=tuple(train), held_out=tuple(kept))


def _phrased(draw: random.Random, left: int, right: int) -> Problem:
    return Problem(left, right, draw.randrange(len(PHRASINGS)))


def is_right(completions: list[list[Message]], answer: list[str], **columns: Any) -> list[float]:
    """Reward function: 1 for the right number and nothing else, 0 otherwise."""
    said = [completion[-1]["content"].strip() for completion in completions]
    return [float(text == right) for text, right in zip(said, answer, strict=True)]


def share_right(model: PreTrainedModel, tokenizer: Any, problems: Sequence[Problem]) -> float:
    """Share of greedy answers that are the right number and nothing else, in 0..1."""
    training = model.training
    model.eval()
    prompts = [
        tokenizer.apply_chat_template(problem.prompt, add_generation_prompt=True, return_dict=False)
        for problem in problems
    ]
    sampling = Sampling(max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False, seed=0)
    found = TransformersEngine(model, tokenizer=tokenizer).generate(prompts, sampling)
    model.train(training)
    texts = tokenizer.batch_decode([completion.ids for completion in found], skip_special_tokens=True)
    right = [text.strip() == problem.answer for text, problem in zip(texts, problems, strict=True)]
    return sum(right) / len(right)


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on `texts`, one token per digit, with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n"), behavior="merged_with_previous"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *ROLES], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def build_model(tokenizer: Any, *, seed: int, layers: int = 2) -> LlamaForCausalLM:
    """A small Llama, its random weights drawn by `seed`."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.08,  # at the usual 0.02 a model this narrow learns several times slower
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
