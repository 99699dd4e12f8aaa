"""Rows of paired preferences -> whole sequences for reward models."""

from collections.abc import Sequence
from dataclasses import dataclass

from trl.data.preference_lengths import Ids
from trl.data.preference_rows import REWARD_COLUMNS
from trl.data.preference_tokens import PairTokenizer, RowCounts, Tokens
from trl.data.rendering import render
from trl.data.spans import encode
from trl.data.tokenization import encode_closed


@dataclass(frozen=True)
class RewardTokenizer(PairTokenizer):
    """Rows as `chosen_input_ids` and `rejected_input_ids`: whole sequences, never cut; longer ones are left out.

    Text ends with one eos; a conversation is what the chat template writes.
    """

    max_length: int | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return REWARD_COLUMNS

    @property
    def numbers(self) -> tuple[str, ...]:
        return ("margin",)

    def text_rows(self, rows: list[dict], indices: Sequence[int]) -> list[Tokens]:
        texts = [self.reader.text(row, index) for index, row in zip(indices, rows, strict=True)]
        joint = [text.prompt + answer for text in texts for answer in (text.chosen, text.rejected)]
        encoded = encode_closed(self.tokenizer, joint, add_special_tokens=self.add_special_tokens)
        return [
            Tokens([], chosen, rejected, removed_begin_tokens=removed)
            for (chosen, removed), (rejected, _) in zip(encoded[::2], encoded[1::2], strict=True)
        ]

    def chat_rows(self, rows: list[dict], indices: Sequence[int]) -> list[Tokens]:
        pairs = [self.reader.chat(row, index) for index, row in zip(indices, rows, strict=True)]
        texts = [
            self.rendered(render, self.reader.place(index, side), pair.prompt._replace(messages=messages))
            for index, pair in zip(indices, pairs, strict=True)
            for side, messages in pair.conversations()
        ]
        encoded = encode(self.tokenizer, texts)
        return [
            Tokens([], chosen, rejected, repeated_prompts=int(pair.is_repeated))
            for pair, chosen, rejected in zip(pairs, encoded[::2], encoded[1::2], strict=True)
        ]

    def finish(self, tokens: Tokens, index: int) -> tuple[dict[str, Ids | None], RowCounts]:
        own = tokens.prompt if tokens.own_prompt is None else tokens.own_prompt
        chosen, rejected = tokens.prompt + tokens.chosen, own + tokens.rejected
        longest = max(len(chosen), len(rejected))
        return {"chosen_input_ids": chosen, "rejected_input_ids": rejected}, RowCounts(
            row=index,
            tokens=len(chosen) + len(rejected),
            removed_tokens=0,
            left_out=int(self.max_length is not None and longest > self.max_length),
            equal_rows=int(chosen == rejected),
            promptless_rows=0,
            shifted_rows=0,
            removed_begin_tokens=tokens.removed_begin_tokens,
            empty_completions=0,
            repeated_prompts=tokens.repeated_prompts,
        )
