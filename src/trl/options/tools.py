"""Option group of tools that a policy calls in its completions."""

from dataclasses import dataclass, field

from trl.options.checks import check_at_least
from trl.options.groups import OptionGroup


@dataclass
class ToolCalling(OptionGroup):
    """How often, and how long, a completion may use tools."""

    max_tool_calling_iterations: int | None = field(
        default=None,
        metadata={
            "help": "How often a completion may stop for the answers of `tools`, >= 1; one that calls again after that is cut off "
            "and counted. None: until max_completion_length, which the answers count toward, or the model's window is reached."
        },
    )
    tool_deadline: float | None = field(
        default=60.0,
        metadata={
            "help": "Seconds after which a call of a tool is not waited for any more: the policy is told so in its place. None: "
            "waits."
        },
    )

    def check(self) -> None:
        super().check()
        check_at_least("max_tool_calling_iterations", self.max_tool_calling_iterations, minimum=1)
        if self.tool_deadline is not None and not self.tool_deadline > 0:
            raise ValueError(
                f"tool_deadline must be > 0 seconds, got {self.tool_deadline}. Use None to wait without end."
            )
