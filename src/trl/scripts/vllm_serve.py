"""`trl vllm-serve`: a model served by vLLM, for trainers that generate with it and send it their weights."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from trl._lazy import attach
from trl.generation.vllm.backend import ServedModel, check_vllm
from trl.options.groups import option
from trl.scripts.parser import TrlParser
from trl.scripts.running import CommandError, reporting_input_errors, run_script

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere


@dataclass
class ServeArguments(ServedModel):
    """The model, how vLLM runs it, and where the server listens."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 lets others in, with TRL_VLLM_SERVER_TOKEN.")
    port: int = option(8000, "Port to listen on.")
    log_level: Literal["debug", "info", "warning", "error", "critical"] = option("info", "Level of logs.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.port < 65536:
            raise ValueError(f"port must be from 1 to 65535, got {self.port}.")


def make_parser() -> TrlParser:
    return TrlParser(
        ServeArguments,  # pyright: ignore[reportArgumentType]
        prog="trl vllm-serve",
        usage="trl vllm-serve --model MODEL [--config FILE] [options]",
        description="Serve a model with vLLM: trainers with use_vllm=True generate with it and send it their weights.",
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run_script(make_parser(), serve, argv)


def serve(arguments: ServeArguments) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises: CommandError without vLLM or the token, or if the address is taken."""
    from trl.generation.serving.connection import CannotServe, check_token_source

    os.environ["VLLM_LOGGING_LEVEL"] = arguments.log_level.upper()
    logging.getLogger("trl").setLevel(arguments.log_level.upper())
    with reporting_input_errors():
        check_vllm("trl vllm-serve")
        check_token_source(arguments.host)
        from trl.generation.vllm.server import run_server
    served = {item.name: getattr(arguments, item.name) for item in fields(ServedModel)}
    try:
        run_server(ServedModel(**served), arguments.host, arguments.port)
    except CannotServe as error:
        raise CommandError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
