"""The end of a training script: saving, pushing, and telling the user where things are."""

from typing import Any


def finish(trainer: Any, *, dataset_name: str | None, command: str) -> None:
    """Save the model (and push it if asked), then print where it is, the final metrics and the command to go on.

    Ends the process group: a process that exits with one open may be aborted by its threads.
    """
    args = trainer.args
    trainer.save_model(args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
    if trainer.accelerator.is_main_process:
        longer = "max_steps" if args.max_steps > 0 else "num_train_epochs"
        lines = summary(args.output_dir, trainer.state.log_history, command=command, longer=longer)
        print("\n".join(lines))
    trainer.accelerator.end_training()


def summary(
    output_dir: str, log_history: list[dict[str, Any]], *, command: str, longer: str = "num_train_epochs"
) -> list[str]:
    """The last lines that a training command prints; a larger value of the option `longer` makes the run longer."""
    lines = [f"Model saved in {output_dir}"]
    metrics = final_metrics(log_history)
    if metrics:
        lines.append("Final metrics: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    lines.append(
        f"To go on: trl {command} with the same options, a larger --{longer} and --resume_from_checkpoint true"
    )
    return lines


def final_metrics(log_history: list[dict[str, Any]]) -> dict[str, float]:
    """The last logged value of each measure of quality, evaluation included; not of speed and bookkeeping."""
    bookkeeping = ("epoch", "step", "total_flos", "learning_rate", "grad_norm", "step_time")
    latest: dict[str, float] = {}
    for entry in log_history:
        for name, value in entry.items():
            timing = name.endswith(("_runtime", "_per_second"))
            if isinstance(value, (int, float)) and name not in bookkeeping and not timing:
                latest[name] = value
    return latest
