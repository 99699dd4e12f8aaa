"""A training script for tests of the launcher: it writes down what each process was given, and ends as it was told.

A process without a config file reads its options without the library, which it would import for six seconds.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass
class ToyOptions:
    record: str = ""
    size: int = 1
    gradient_accumulation_steps: int = 1
    status: int = 0


def main(options: ToyOptions) -> None:
    names = ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "TRL_TEST_C")
    seen = {name: os.environ.get(name) for name in names}
    seen |= {"size": options.size, "gradient_accumulation_steps": options.gradient_accumulation_steps}
    seen["pid"] = os.getpid()
    if options.record:
        Path(options.record, f"{os.environ.get('LOCAL_RANK', 0)}.json").write_text(json.dumps(seen))
    if options.status:
        sys.exit(options.status)


def make_parser() -> Any:
    from trl.scripts.parser import TrlParser

    return TrlParser(ToyOptions, prog="trl toy")


if __name__ == "__main__":
    if "--config" in sys.argv:
        from trl.scripts.running import run_script

        sys.exit(run_script(make_parser(), main))
    parser = argparse.ArgumentParser()
    for option in fields(ToyOptions):
        parser.add_argument(f"--{option.name}", type=type(option.default), default=option.default)
    main(ToyOptions(**vars(parser.parse_args())))
