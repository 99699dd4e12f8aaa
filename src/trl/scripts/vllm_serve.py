"""`trl vllm-serve`: a model served by vLLM, for trainers that generate with it and send it their weights."""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Literal

from trl._lazy import attach
from trl.generation.serving.connection import check_token_source, needing_address, server_token, until_told
from trl.generation.vllm.backend import BackendDied, ServedModel, VLLMBackend, check_vllm
from trl.options.groups import option
from trl.scripts.parser import TrlParser
from trl.scripts.running import CommandError, reporting_input_errors, run_script

logger = logging.getLogger(__name__)
__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere


@dataclass
class ServeArguments(ServedModel):
    """The model, how vLLM runs it, and where the server listens."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 lets others in, with TRL_VLLM_SERVER_TOKEN.")
    port: int = option(8000, "Port to listen on.", "[1, 65535]")
    log_level: Literal["debug", "info", "warning", "error", "critical"] = option("info", "Level of logs.")


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
    """Load the model and answer requests until SIGTERM or Ctrl-C.

    Raises: CommandError without vLLM or the token, if the address is taken, or if vLLM cannot run the model or ends
    (TRL_TRACEBACK=1 shows vLLM's own error).
    """
    os.environ["VLLM_LOGGING_LEVEL"] = arguments.log_level.upper()
    logging.getLogger("trl").setLevel(arguments.log_level.upper())
    host, port = arguments.host, arguments.port
    with until_told(), ExitStack() as stack:
        with reporting_input_errors():
            check_vllm("trl vllm-serve")
            check_token_source(host)
            from trl.generation.serving.app import GenerationServer

            with needing_address(host, port):
                server = stack.enter_context(closing(GenerationServer(host, port)))
            try:
                backend = stack.enter_context(closing(VLLMBackend(arguments)))
            except Exception as error:
                raise CommandError(f"vLLM could not load {arguments.model}: {error} See its log above.") from error
            # Another one may have begun to listen meanwhile.
            with needing_address(host, port):
                server.listen()
            # The port is this server's: the file is named after it, and would replace that of another.
            token = stack.enter_context(server_token(host, port))
        logger.info("Serving %s on http://%s:%d", arguments.model, host, port)
        try:
            server.serve(backend, token=token)
        except BackendDied as error:
            raise CommandError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
