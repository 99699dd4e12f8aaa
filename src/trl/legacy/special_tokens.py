"""Begin and end tokens of a preference pair that is tokenised already, where they are missing."""

from __future__ import annotations

from typing import Any

Tokens = dict[str, list[int]]


def add_bos_token_if_needed(
    bos_token_id: int | None,
    prompt_len_input_ids: int,
    prompt_tokens: Tokens,
    chosen_prompt_len_input_ids: int,
    chosen_tokens: Tokens,
    rejected_prompt_len_input_ids: int,
    rejected_tokens: Tokens,
) -> tuple[Tokens, Tokens, Tokens]:
    """Begin `prompt_input_ids` of the prompt, and of the prompt as it stands before each answer, with the begin token.

    `*_len_input_ids` are their lengths in tokens. Those that begin with it stay as they are, and so does everything where
    there is none (`bos_token_id=None`). `prompt_attention_mask` goes along. The dicts are changed in place and given back.

    >>> tokens = [{"prompt_input_ids": ids, "prompt_attention_mask": [1]} for ids in ([1], [1], [5])]
    >>> found = add_bos_token_if_needed(1, 1, tokens[0], 1, tokens[1], 1, tokens[2])
    >>> [each["prompt_input_ids"] for each in found]
    [[1], [1], [1, 5]]
    """
    lengths = (prompt_len_input_ids, chosen_prompt_len_input_ids, rejected_prompt_len_input_ids)
    found = (prompt_tokens, chosen_tokens, rejected_tokens)
    for length, tokens in zip(lengths, found, strict=True):
        missing = length == 0 or tokens["prompt_input_ids"][0] != bos_token_id
        if bos_token_id is not None and missing:
            tokens["prompt_input_ids"] = [bos_token_id, *tokens["prompt_input_ids"]]
            tokens["prompt_attention_mask"] = [1, *tokens["prompt_attention_mask"]]
    return found


def add_eos_token_if_needed(
    eos_token_id: int, chosen_tokens: dict[str, Any], rejected_tokens: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """End `input_ids` of both answers with the end token, unless they do; `attention_mask` goes along. In place.

    >>> pair = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in ([5, 2], [6])]
    >>> [each["input_ids"] for each in add_eos_token_if_needed(2, *pair)]
    [[5, 2], [6, 2]]
    """
    for tokens in (chosen_tokens, rejected_tokens):
        if tokens["input_ids"][-1:] != [eos_token_id]:
            tokens["input_ids"] = [*tokens["input_ids"], eos_token_id]
            tokens["attention_mask"] = [*tokens["attention_mask"], 1]
    return chosen_tokens, rejected_tokens
