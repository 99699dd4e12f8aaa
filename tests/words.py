"""A tokenizer that knows a few words: one token each, nothing downloaded, easy to read in a test."""

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

WORDS = ["hi", "yes", "no", "one", "two", "three", "four", "user:", "bot:", "a", "b", "c", "d", "e", "f"]
SPECIALS = ["<pad>", "<unk>", "<s>", "</s>", "<user>", "<assistant>", "<system>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def word_tokenizer(*, pad_token: str | None = "<pad>", chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Ids are those of `SPECIALS`, then `WORDS`; words are split at white space."""
    names = [*SPECIALS, *WORDS]
    tokenizer = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token=pad_token
    )
    fast.chat_template = chat_template
    return fast
