import pytest
from accelerate.commands.config.config_args import load_config_from_file

from trl.cli.launch_options import PROFILES, launch_actions, profile_path, split_arguments, split_config

OURS = ["--size", "--debug", "--gradient_accumulation_steps", "--names"]


@pytest.fixture(scope="module")
def actions():
    return launch_actions()


@pytest.mark.parametrize(
    ("line", "script", "launch"),
    [
        ("--size 3", "--size 3", ""),
        ("--num_processes 4 --size 3", "--size 3", "--num_processes 4"),
        ("--num-processes=4 --size 3", "--size 3", "--num-processes=4"),
        ("--names a b --cpu --size 3", "--names a b --size 3", "--cpu"),
        ("--mixed_precision bf16 stray", "stray", "--mixed_precision bf16"),
        ("--debug --gradient_accumulation_steps 2", "--debug --gradient_accumulation_steps 2", ""),
        ("--unknown 1 --multi_gpu", "--unknown 1", "--multi_gpu"),
        ("--module x", "--module x", ""),
    ],
)
def test_split_arguments(actions, line, script, launch):
    split = split_arguments(line.split(), script_options=OURS, launch=actions)
    assert (split.script, split.launch) == (script.split(), launch.split())


@pytest.mark.parametrize("spelling", ["--accelerate_config zero2", "--accelerate-config=zero2"])
def test_a_profile_becomes_its_file(actions, spelling):
    split = split_arguments(spelling.split(), script_options=OURS, launch=actions)
    assert split == ([], ["--config_file", str(PROFILES / "zero2.yaml")])


def test_a_launch_option_without_its_value(actions):
    with pytest.raises(ValueError, match="--num_processes needs a value"):
        split_arguments(["--num_processes"], script_options=OURS, launch=actions)


def test_split_config(actions):
    values = {
        "size": 3,
        "num_processes": 4,
        "mixed_precision": False,
        "cpu": True,
        "multi_gpu": False,
        "odd": 1,
    }
    script, launch = split_config(values, script_options=OURS, launch=actions)
    assert script == {"size": 3, "odd": 1}
    assert launch == ["--num_processes", "4", "--mixed_precision", "no", "--cpu"]
    assert split_config({"accelerate_config": "cpu"}, script_options=OURS, launch=actions)[1] == [
        "--config_file",
        str(PROFILES / "cpu.yaml"),
    ]
    with pytest.raises(ValueError, match="`cpu` must be true or false, got 'please'"):
        split_config({"cpu": "please"}, script_options=OURS, launch=actions)


def test_profiles_by_name_and_by_path(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: 'NO'\n")
    assert profile_path(str(own)) == str(own)
    with pytest.raises(FileNotFoundError, match=r"got 'fsdp3'\. Did you mean fsdp"):
        profile_path("fsdp3")


KINDS = {
    "single_gpu": "NO",
    "cpu": "NO",
    "multi_gpu": "MULTI_GPU",
    "fsdp1": "FSDP",
    "fsdp2": "FSDP",
    "zero1": "DEEPSPEED",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
}


def test_every_profile_is_there():
    assert {path.stem for path in PROFILES.glob("*.yaml")} == set(KINDS)


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_accelerate_reads_the_profiles(name, kind):
    config = load_config_from_file(profile_path(name))
    assert config.distributed_type == kind
    assert config.use_cpu is (name == "cpu")
    if kind == "FSDP":
        assert config.fsdp_config["fsdp_version"] == int(name[-1])
    if kind == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(name[-1])
