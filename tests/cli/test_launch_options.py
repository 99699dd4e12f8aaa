from dataclasses import dataclass, field

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from trl.cli.launch import PROFILES, make_plan, profile_path
from trl.scripts.config_file import ConfigFile
from trl.scripts.parser import TrlParser


@dataclass
class Ours:
    size: int = 1
    debug: str = ""
    gradient_accumulation_steps: int = 1
    names: list[str] = field(default_factory=list)


def plan(line="", **values):
    config = ConfigFile("run.yaml", values, {}, {}) if values else None
    found = make_plan(TrlParser(Ours), line.split(), config)
    found.launch.pop("nondefault", None)  # accelerate's note of what was given
    return found


@pytest.mark.parametrize(
    ("line", "script", "launch"),
    [
        ("--size 3", "--size 3", {}),
        ("--num_processes 4 --size 3", "--size 3", {"num_processes": 4}),
        ("--num-processes=4 --size 3", "--size 3", {"num_processes": 4}),
        ("--names a b --cpu --size 3", "--names a b --size 3", {"cpu": True}),
        ("--mixed_precision bf16 stray", "stray", {"mixed_precision": "bf16"}),
        ("--debug --gradient_accumulation_steps 2", "--debug --gradient_accumulation_steps 2", {}),
        ("--unknown 1 --multi_gpu", "--unknown 1", {"multi_gpu": True}),
        ("--module x --size -1 --size=2", "--module x --size -1 --size=2", {}),
    ],
)
def test_the_command_line_is_split(line, script, launch):
    assert plan(line) == (script.split(), None, launch)


@pytest.mark.parametrize("spelling", ["--accelerate_config zero2", "--accelerate-config=zero2"])
def test_a_profile_becomes_its_file(spelling):
    assert plan(spelling) == ([], None, {"config_file": str(PROFILES / "zero2.yaml")})


def test_the_config_file_is_split_and_the_command_line_wins():
    _, config, launch = plan(
        "--num_machines 2", size=3, num_processes=4, num_machines=1, mixed_precision=False, cpu=True, multi_gpu=False,
        rdzv_backend=None, odd=1, accelerate_config="cpu",
    )  # fmt: skip
    assert config is not None and config.values == {"size": 3, "odd": 1}
    assert launch == {
        "num_processes": 4, "num_machines": 2, "mixed_precision": "no", "cpu": True, "config_file": str(PROFILES / "cpu.yaml"),
    }  # fmt: skip
    with pytest.raises(ValueError, match="`cpu` must be true or false, got 'please'"):
        plan(cpu="please")


def test_profiles_by_name_and_by_path(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: 'NO'\n")
    assert profile_path(str(own)) == str(own)
    with pytest.raises(FileNotFoundError, match=r"got 'fsdp3'\. Did you mean fsdp"):
        profile_path("fsdp3")


KINDS = {
    "single_gpu": "NO", "cpu": "NO", "multi_gpu": "MULTI_GPU", "fsdp1": "FSDP", "fsdp2": "FSDP",
    "zero1": "DEEPSPEED", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED",
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_accelerate_reads_the_profiles(name, kind):
    config = load_config_from_file(profile_path(name))
    assert config.distributed_type == kind
    assert config.use_cpu is (name == "cpu")
    if kind == "FSDP":
        assert config.fsdp_config["fsdp_version"] == int(name[-1])
    if kind == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(name[-1])
