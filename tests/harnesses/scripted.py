"""A policy of random weights, and an engine that writes the answers of a script as if that policy had sampled them."""

import json

import torch

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl.data.training_templates import QWEN3_TRAINING_TEMPLATE
from trl.generation.engine import Generated


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class Scripted:
    """Writes the answers of a script instead of sampling, with the policy's log-probs of their tokens."""

    exact, together = True, False

    def __init__(self, engine, tokenizer, answers):
        self.engine, self.tokenizer, self.answers = engine, tokenizer, answers

    def generate(self, prompts, sampling, *, streams=None, limits=None):
        return [self.written(list(prompt), sampling.stop_strings) for prompt in prompts]

    def written(self, prompt, stops):
        text = self.tokenizer.decode(prompt)
        number = next(n for n in range(len(self.answers)) if f"Step {n}." not in text)
        ids = self.tokenizer.encode(f"Step {number}.\n{self.answers[number]}", add_special_tokens=False)
        ids.append(self.tokenizer.eos_token_id)
        cut = (n for n in range(len(ids)) if any(stop in self.tokenizer.decode(ids[:n]) for stop in stops))
        ids = ids[: next(cut, None)]
        return Generated(ids, logps_of(self.engine.model, prompt + ids)[-len(ids) :], None, "stop")

    def sync_weights(self, model, step):
        self.engine.sync_weights(model, step)

    def close(self):
        self.engine.close()


@torch.no_grad()
def logps_of(model, ids):
    logits = model(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def words():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN3_TRAINING_TEMPLATE
    return tokenizer


def policy():
    sizes = {"vocab_size": len(words()), "max_position_embeddings": 32768}
    return tiny_model("qwen3", eos_token_id=words().eos_token_id, **sizes)
