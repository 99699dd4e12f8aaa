"""As a program: fails if the online trainers import packages that only servers need."""

import sys

import trl.trainer.group_setup

if __name__ == "__main__":
    assert trl.trainer.group_setup
    found = {name.partition(".")[0] for name in sys.modules} & {"fastapi", "uvicorn", "starlette"}
    assert not found, found
