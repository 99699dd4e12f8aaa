"""Runs a harness on a task in a folder of its own, and prints the reward: `run.py NAME FOLDER_OF_HARNESSES BASE_URL KEY ROW`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_CONFIGURED": "true", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
}  # fmt: skip
KNOWN = {"openai/policy": {"litellm_provider": "openai", "mode": "chat", "max_input_tokens": 32768}}


def command(name: str, folder: Path, *, base_url: str, key: str, task: str) -> list[str]:
    """The command line of a harness. Files that it needs are written to `folder`."""

    def file(name: str, content: object) -> str:
        (folder / name).write_text(json.dumps(content))  # which is YAML, too
        return str(folder / name)

    program, _, kind = name.partition(":")
    if program == "smolagents":
        return ["python", str(Path(__file__).with_name("smolagents_task.py")), kind, base_url, key, task]
    if program == "mini-swe-agent":
        model = {"cost_tracking": "ignore_errors", "model_kwargs": {"api_base": base_url, "api_key": key}}
        if kind == "text":
            model["model_class"] = "litellm_textbased"
        config = file("policy.yaml", {"agent": {"cost_limit": 0}, "model": model})
        return [
            "mini", "--model", "openai/policy", "-c", "mini_textbased.yaml" if kind == "text" else "mini.yaml", "-c", config,
            "--task", task, "--yolo", "--exit-immediately", "--output", str(folder / "trajectory.json"),
        ]  # fmt: skip
    return [
        "aider", "--model", "openai/policy", "--openai-api-base", base_url, "--openai-api-key", key, "--message", task,
        "--model-settings-file", file("settings.yml", [{"name": "openai/policy", "use_temperature": False}]),
        "--model-metadata-file", file("known.json", KNOWN), "--auto-test", "--test-cmd", f"{sys.executable} test.py",
        "--yes-always", "--no-git", "--no-check-update", "--no-show-release-notes", "--analytics-disable", "sums.py",
    ]  # fmt: skip


def main(name: str, harnesses: str, base_url: str, key: str, row: str) -> None:
    given = json.loads(row)
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
        for file, text in given["files"].items():
            (Path(work) / file).write_text(text)
        line = command(name, Path(home), base_url=base_url, key=key, task=given["prompt"][-1]["content"])
        path = f"{Path(harnesses) / name.partition(':')[0] / 'bin'}:{os.environ['PATH']}"
        subprocess.run(
            line, cwd=work, env={**os.environ, **QUIET, "HOME": home, "PATH": path}, stdout=sys.stderr, check=True
        )  # fmt: skip
        passed = subprocess.run([sys.executable, "test.py"], cwd=work).returncode == 0
    print(json.dumps({"reward": float(passed)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
