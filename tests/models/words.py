"""Word-level tokenizers of a few tokens, for tests about special tokens rather than about tokenisation."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("<pad>", "<s>", "</s>", "<unk>", "the", "cat", "sat", "on", "mat", "user", "assistant")


def word_tokenizer(*, special_tokens: tuple[str, ...] = (), **options) -> PreTrainedTokenizerFast:
    """Splits on white space; ids are positions in `WORDS`, then `special_tokens`. `options` set eos, pad and so on."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **options)
    if special_tokens:
        tokenizer.add_tokens(list(special_tokens), special_tokens=True)
    return tokenizer
