"""As a program: fails if the online trainers import packages that only servers need."""

import importlib
import sys

SERVERS = {"fastapi", "uvicorn", "starlette"}

if __name__ == "__main__":
    for name in [name for name in sys.modules if name.partition(".")[0] in {"trl", *SERVERS}]:
        del sys.modules[name]
    importlib.import_module("trl.trainer.group_setup")
    found = {name.partition(".")[0] for name in sys.modules} & SERVERS
    assert not found, found
