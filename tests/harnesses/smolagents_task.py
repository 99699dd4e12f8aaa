"""An agent of smolagents, run by its own Python in the folder of the task: `smolagents_task.py code|tools BASE_URL KEY TASK`."""

import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def read(file: str) -> str:
    """Reads a file.

    Args:
        file: Its name.
    """
    return Path(file).read_text()


@tool
def write(file: str, text: str) -> str:
    """Writes a file.

    Args:
        file: Its name.
        text: Its new content.
    """
    Path(file).write_text(text)
    return "written"


kind, base_url, key, task = sys.argv[1:]
roles = {"tool-call": "user", "tool-response": "user"}  # "tool-call" would be added to what the policy wrote
given = {"code": {}, "tools": {"tool_choice": "auto"}}[kind]
model = OpenAIModel("policy", api_base=base_url, api_key=key, custom_role_conversions=roles, **given)
agent = {"code": CodeAgent, "tools": ToolCallingAgent}[kind](tools=[read, write], model=model, max_steps=6)
agent.run(task)
