from types import SimpleNamespace

import pytest

from trl.scripts.loading import check_processes


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("WORLD_SIZE", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)


def args(world_size, kind):
    state = SimpleNamespace(distributed_type=SimpleNamespace(value=kind))
    return SimpleNamespace(world_size=world_size, distributed_state=state)


def test_processes_that_are_not_connected(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes are not connected"):
        check_processes(args(1, "NO"))


@pytest.mark.parametrize(
    ("variable", "name"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")]
)
def test_sharding_that_is_not_in_use(monkeypatch, variable, name):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=f"{name} does not shard"):
        check_processes(args(2, "MULTI_CPU"))
    check_processes(args(2, "MULTI_GPU"))
