"""`trl serve MODEL`: a model behind an OpenAI-style endpoint, for agents and for distillation."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from trl.options.groups import option
from trl.scripts.chat import LoadedModel, loaded_engine, model_first
from trl.scripts.parser import TrlParser
from trl.scripts.running import reporting_input_errors, run_script


@dataclass
class ServeArguments(LoadedModel):
    """The model of `trl serve`, and where it listens."""

    command = "serve"
    device: str | None = option(None, "Device to run on. None: the accelerator, else the CPU.")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 lets others in, with TRL_VLLM_SERVER_TOKEN.")
    port: int = option(8000, "Port to listen on; 0 for a free one.", "[0, 65535]")
    max_new_tokens: int = option(2048, "Most tokens of a completion, for which memory is planned.", ">= 1")
    served_model_name: str | None = option(None, "What clients call the model. None: its folder or Hub name.")


def make_parser() -> TrlParser:
    return TrlParser(
        ServeArguments,  # pyright: ignore[reportArgumentType]
        prog="trl serve",
        usage="trl serve MODEL [options]",
        description="Serve a model with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.",
    )


def serve(arguments: ServeArguments) -> None:
    """Answer requests until SIGTERM or Ctrl-C. Raises: CommandError without model, token or a free address."""
    from trl.generation.serving.connection import (
        VARIABLE,
        check_token_source,
        needing_address,
        server_token,
        token_file,
        until_told,
    )

    with until_told(), ExitStack() as stack:
        with reporting_input_errors():
            check_token_source(arguments.host)
            from trl.agents.endpoint import Endpoint
            from trl.generation.engine import Sampling
            from trl.generation.serving.app import HTTPServer

        with reporting_input_errors(), needing_address(arguments.host, arguments.port):
            server = stack.enter_context(closing(HTTPServer(arguments.host, arguments.port)))
        with reporting_input_errors():
            engine = loaded_engine(arguments)
        name = arguments.served_model_name or str(arguments.model_name_or_path)
        sampling = Sampling(max_new_tokens=arguments.max_new_tokens)
        # Another one may have begun to listen meanwhile.
        with reporting_input_errors(), needing_address(arguments.host, arguments.port):
            endpoint = Endpoint(
                engine, engine.tokenizer, server=server, sampling=sampling, agent_sampling="agent", threaded=False,
                model_name=name,
            )  # fmt: skip
            stack.enter_context(endpoint)
        with reporting_input_errors():
            token = stack.enter_context(server_token(arguments.host, endpoint.port))
        endpoint.session(key=token, keeps=False)
        place = VARIABLE if os.environ.get(VARIABLE, "").strip() else token_file(endpoint.port)
        print(f"Serving {name} on {endpoint.base_url}. The API key is in {place}.", flush=True)
        endpoint.run(lambda: False)


def main(argv: Sequence[str] | None = None) -> int:
    return run_script(make_parser(), serve, model_first(argv))
