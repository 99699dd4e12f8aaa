"""Builds a small model and its tokenizer without a download, for experiments on a laptop.

    python examples/small_model.py --out runs/model

trains a byte-level BPE tokenizer on the rows of `trl data` (or with `--text` on the strings of a jsonl file) and saves it with a
Llama of random weights: four layers, 256 wide, about 4 million parameters; 5 million at the largest vocabulary. `--layers 1
--width 128` makes one of 0.3 million. The tokenizer has Qwen3's chat template.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl import make_data
from trl.data.training_templates import QWEN3_TRAINING_TEMPLATE

PAD, START, EOS = "<|pad|>", "<|im_start|>", "<|im_end|>"
KINDS = ("problems", "chats", "steps", "tools")  # together they have every word of `trl data`


def strings(value: object) -> Iterator[str]:
    """Every string of a row: of its values, and inside their lists and dicts, as those of `messages`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def built_in() -> Iterator[str]:
    """The rows of `trl data`, as JSON: their words, and the form of tool calls."""
    for kind in KINDS:
        yield from map(json.dumps, make_data(kind)["train"])


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens; no text is unknown to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, chat_template=QWEN3_TRAINING_TEMPLATE
    )


def small_llama(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, layers: int = 4, width: int = 256
) -> LlamaForCausalLM:
    """A Llama with tied embeddings for the tokenizer, its weights drawn from `seed`; `width` is a multiple of 64."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text", type=Path, help="jsonl file whose strings train the tokenizer; default: rows of `trl data`"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for model and tokenizer")
    parser.add_argument("--vocabulary", type=int, default=4096, help="size of the vocabulary, in tokens")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--width", type=int, default=256, help="width of the model, a multiple of 64")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    args = parser.parse_args()

    lines = args.text.read_text(encoding="utf-8").splitlines() if args.text else []
    texts = (text for line in lines for text in strings(json.loads(line))) if args.text else built_in()
    tokenizer = train_tokenizer(texts, args.vocabulary)
    model = small_llama(tokenizer, seed=args.seed, layers=args.layers, width=args.width)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{len(tokenizer):,} tokens, {model.num_parameters():,} parameters in {args.out}")


if __name__ == "__main__":
    main()
