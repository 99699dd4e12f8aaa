"""Whether the processes that a launcher started work together, in the way that was asked for."""

import os
from typing import Any


def check_processes(args: Any) -> None:
    """Check that the distributed state of a training config is what its launcher promised in the environment.

    accelerate (1.15) does not refuse what it cannot do without an accelerator: processes on a CPU that it was not told
    to connect train one model each, into the same directory, and sharding that it cannot do becomes plain data
    parallelism.

    Raises:
        ValueError: if processes are not connected, or the sharding that was asked for is not in use.
    """
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if args.world_size != started:
        raise ValueError(
            f"{started} processes were started but are not connected: each would train a model of its own. On a CPU "
            "use --accelerate_config cpu (or set ACCELERATE_USE_CPU=true); elsewhere check that every process sees an "
            "accelerator."
        )
    state = args.distributed_state
    kind = getattr(getattr(state, "distributed_type", None), "value", "NO")
    for variable, name in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes") and kind == "MULTI_CPU":
            raise ValueError(
                f"{name} was asked for, but accelerate does not shard over CPU processes: it would train with plain "
                "data parallelism instead. Use --accelerate_config cpu for that."
            )
