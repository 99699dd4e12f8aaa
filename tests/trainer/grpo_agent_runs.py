"""Small runs of GRPO and RLOO with agents; as a program under torchrun: `-m tests.trainer.grpo_agent_runs OUT.pt SETTINGS`."""

import sys

import openai
from datasets import Dataset

from tests.agents.test_sessions import SCHEMAS, answers, as_dict, connection
from tests.trainer import grpo_runs
from tests.trainer.grpo_tool_runs import QUESTIONS, make

SETTINGS = {
    "max_completion_length": 8, "num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 2,
    "max_tool_calling_iterations": None,
}  # fmt: skip
ROWS = Dataset.from_list([
    {"prompt": [{"role": "user", "content": text}], "number": number} for number, text in enumerate(QUESTIONS)
])  # fmt: skip


async def tool_agent(row, base_url, api_key, *, rounds=2):
    """Answers calls; its reward is the number of calls and a little for length."""
    client = openai.AsyncOpenAI(**connection(base_url, api_key))
    messages, count = list(row["prompt"]), 0
    for _ in range(rounds):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=SCHEMAS)
        reply = answer.choices[0].message
        count += len(reply.tool_calls or []) + 0.01 * answer.usage.completion_tokens
        messages += [as_dict(reply), *answers(reply)]
    return count


async def forgetful(row, base_url, api_key):
    """Takes back a word of what the policy said, so that its session has several trees; asks twice for the last answer."""
    client = openai.AsyncOpenAI(**connection(base_url, api_key))
    messages, length = list(row["prompt"]), 0
    for number in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages, n=1 + number)
        text = answer.choices[0].message.content
        length += answer.usage.completion_tokens
        messages += [{"role": "assistant", "content": f"{text} no"}, {"role": "user", "content": "hi"}]
    return {"reward": length + row["number"]}


def agents(method="grpo", *, agent=tool_agent, given=None, **settings):
    given = {"agent": agent, "tools": None, **(given or {})}
    return make(method, reward_funcs=None, **{**SETTINGS, "data": ROWS, "given": given, **settings})


def trained(*method, **settings):
    trainer, gradients = agents(*method, **settings)
    trainer.train()
    return trainer, gradients


if __name__ == "__main__":
    grpo_runs.main(*sys.argv[1:], make=agents, rows=ROWS.select(range(3)))
