"""The cache is emptied after the block, where it is asked for, errors included."""

import pytest

from trl.models import switches
from trl.models.switches import PPODecorators


@pytest.mark.parametrize("asked", [True, False])
def test_the_switch_decides(monkeypatch, asked):
    emptied = []
    monkeypatch.setattr(switches, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(PPODecorators, "optimize_device_cache", asked)

    @PPODecorators.empty_device_cache()
    def step(fails):
        if fails:
            raise RuntimeError("out of memory")
        return 3

    assert step(False) == 3
    with pytest.raises(RuntimeError):
        step(True)
    assert len(emptied) == (2 if asked else 0)
