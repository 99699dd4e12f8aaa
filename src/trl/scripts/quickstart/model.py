"""A tiny tokenizer and a tiny decoder, made here: nothing is downloaded."""

from collections.abc import Iterable

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
ROLES = ("system\n", "user\n", "assistant\n")
MAX_POSITIONS = 256  # tokens
# ChatML; the line between two turns belongs to the later one, so that a reply ends, for every trainer, with its stop token.
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


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 512) -> PreTrainedTokenizerBase:
    """Byte-level BPE trained on `texts` (contents of messages), with a ChatML template whose turns end with the eos token.

    Every digit is a token of its own, so that a model sees numbers place by place. All bytes are in the
    vocabulary, so any text can be encoded; it has at most `vocab_size` entries.
    """
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


def build_model(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> LlamaForCausalLM:
    """A Llama-like decoder with random weights that depend on `seed` only."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.08,  # at the usual 0.02 a model this narrow takes several times longer to learn
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def count_parameters(model: torch.nn.Module) -> int:
    """Number of weights, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
