"""Chat templates for base models: the template, its tokens and their embedding rows."""

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trl.data.hub import loading_from_hub
from trl.models.distributed import gathered_parameters
from trl.models.parts import embedded_tokens

Tokenizer = TypeVar("Tokenizer", bound=PreTrainedTokenizerBase)


@dataclass
class ChatMlSpecialTokens:
    """The special tokens of ChatML and its template."""

    bos_token: str = "<|im_start|>"
    eos_token: str = "<|im_end|>"
    pad_token: str = "<|im_end|>"

    # The beginning of a message of each role.
    system = property(lambda self: f"{self.bos_token}system")
    user = property(lambda self: f"{self.bos_token}user")
    assistant = property(lambda self: f"{self.bos_token}assistant")

    @property
    def chat_template(self) -> str:
        """Jinja: for each message its role on a line, its content, the eos token and a line break."""
        return (
            "{% for message in messages %}"
            f"{{{{ '{self.bos_token}' + message['role'] + '\\n' + message['content'] + '{self.eos_token}\\n' }}}}"
            "{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ '{self.assistant}\\n' }}}}{{% endif %}}"
        )


CHAT_FORMATS = {"chatml": ChatMlSpecialTokens}


def clone_chat_template(
    model: PreTrainedModel, tokenizer: Tokenizer, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[PreTrainedModel, Tokenizer, list[int]]:
    """Copy the chat template of another tokenizer, with its tokens, to a tokenizer and its model.

    Adds the source's added tokens that are missing, sets its eos token (and its pad token if there is none), writes
    both into the model's `config` and `generation_config`, and grows the embeddings to a multiple of
    `resize_to_multiple_of` rows (never shrinks them). New rows start at the mean of the old ones.

    Returns the model, the tokenizer (both changed in place) and the ids of the added tokens, for
    `LoraConfig(trainable_token_indices=...)`.
    """
    with loading_from_hub(source_tokenizer_path, "tokenizer"):
        source: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source_tokenizer_path)
    if source.chat_template is None:
        raise ValueError(f"The tokenizer in '{source_tokenizer_path}' has no chat template to clone.")
    vocabulary_before = len(tokenizer)
    tokenizer.chat_template = source.chat_template
    added = _add_missing_tokens(tokenizer, source)
    if source.eos_token is not None:
        tokenizer.eos_token = source.eos_token
    if tokenizer.pad_token is None:
        tokenizer.pad_token = source.pad_token or source.eos_token
    _grow_embeddings(model, len(tokenizer), vocabulary_before, added, resize_to_multiple_of)
    _sync_special_tokens(model, tokenizer, ("eos_token_id", "pad_token_id"))
    return model, tokenizer, added


def setup_chat_format(
    model: PreTrainedModel, tokenizer: Tokenizer, format: Literal["chatml"] | None = "chatml",
    resize_to_multiple_of: int | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:  # fmt: skip
    """Give a base model a ready-made chat format: its template, special tokens and embedding rows, in place.

    Raises `ValueError` for an unknown format and for a tokenizer that has a template already.
    """
    if format not in CHAT_FORMATS:
        raise ValueError(f"format must be one of {[*CHAT_FORMATS]}, got {format!r}.")
    if tokenizer.chat_template is not None:
        raise ValueError("The tokenizer has a chat template. Leave setup_chat_format out, or set it to None.")
    tokens = CHAT_FORMATS[format]()
    before, vocabulary_before = set(tokenizer.get_vocab().values()), len(tokenizer)
    tokenizer.add_special_tokens(vars(tokens))
    tokenizer.chat_template = tokens.chat_template
    added = sorted(set(tokenizer.get_vocab().values()) - before)
    _grow_embeddings(model, len(tokenizer), vocabulary_before, added, resize_to_multiple_of)
    _sync_special_tokens(model, tokenizer, ("bos_token_id", "eos_token_id", "pad_token_id"))
    return model, tokenizer


def _add_missing_tokens(tokenizer: Any, source: Any) -> list[int]:
    """Add the source's added tokens, and its eos and pad, that the tokenizer lacks; returns their new ids."""
    known = tokenizer.get_vocab()
    missing = [token for token in source.added_tokens_decoder.values() if token.content not in known]
    tokenizer.add_tokens(missing)
    names = [token.content for token in missing]
    for token in (source.eos_token, source.pad_token):
        if token is not None and token not in known and token not in names:
            tokenizer.add_tokens([token], special_tokens=True)
            names.append(token)
    return tokenizer.convert_tokens_to_ids(names)


@torch.no_grad()
def _grow_embeddings(
    model: PreTrainedModel, vocabulary: int, vocabulary_before: int, added: list[int], multiple: int | None
) -> None:
    """Grow the embeddings to `vocabulary` rows or more; new rows and tokens start at the mean of the known ones.

    So a new token is as likely as an average one (Hewitt 2021, "Initializing new word embeddings for pretrained LMs").
    """
    rows_before = embedded_tokens(model)
    rows = max(rows_before, -(-vocabulary // (multiple or 1)) * (multiple or 1))
    if rows > rows_before:
        model.resize_token_embeddings(rows, mean_resizing=False)
    new_rows, known = sorted({*added, *range(rows_before, rows)}), min(vocabulary_before, rows_before)
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    tensors = [getattr(module, name, None) for module in modules for name in ("weight", "bias")]
    unique = {id(tensor): tensor for tensor in tensors if tensor is not None and new_rows}.values()
    with gathered_parameters(unique, modifier_rank=0):
        for tensor in unique:
            index = torch.tensor(new_rows, device=tensor.device)
            tensor.data[index] = tensor.data[:known].float().mean(dim=0).to(tensor.dtype)


def _sync_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fields: tuple[str, ...]) -> None:
    """Write the tokenizer's special ids into the model's config and generation config."""
    for config in (model.config, getattr(model, "generation_config", None)):
        for field in fields:
            if config is not None and getattr(tokenizer, field) is not None:
                setattr(config, field, getattr(tokenizer, field))
