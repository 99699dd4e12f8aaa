"""Completions traced, or scored in an evaluation, in Weights & Biases Weave."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from transformers import GenerationConfig, Trainer, TrainerCallback

from trl.reporting.trackers import active_wandb_run
from trl.trainer.samples import Sample, evaluation_rows, sample_completions


class WeaveCallback(TrainerCallback):
    """Sends completions of evaluation prompts to Weave at each evaluation.

    Without `scorers` every completion is a trace of the op `generate_completion`. With `scorers` (name to
    `scorer(prompt, completion)`, a number, bool or dict of them) they form a Weave evaluation: one prediction a
    completion with its scores, and a summary with the mean of each numeric score.

    The project is `project_name`, else that of the active wandb run. The model is called `model_name`, else by the
    last part of its name or path.
    """

    def __init__(
        self, trainer: Trainer, project_name: str | None = None,
        scorers: dict[str, Callable[[str, str], object]] | None = None,
        generation_config: GenerationConfig | None = None, num_prompts: int | None = None,
        dataset_name: str = "eval_dataset", model_name: str | None = None,
    ):  # fmt: skip
        if find_spec("weave") is None:
            raise ImportError("WeaveCallback needs the weave package. Install it with `pip install weave`.")
        self.trainer, self.project_name, self.scorers = trainer, project_name, scorers or {}
        self.generation_config, self.dataset_name, self.model_name = generation_config, dataset_name, model_name
        self.rows = evaluation_rows(trainer, num_prompts, "WeaveCallback")
        self._weave: Any = None
        self._last_step = -1

    @property
    def is_evaluation_mode(self) -> bool:
        """Whether completions are scored in an evaluation (there are scorers) or traced."""
        return bool(self.scorers)

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self._connect()

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step == self._last_step:
            return
        self._last_step = state.global_step
        samples = sample_completions(self.trainer, self.rows, self.generation_config)
        if not self.trainer.accelerator.is_main_process:
            return
        self._connect()
        facts = {"epoch": state.epoch, "global_step": state.global_step, "dataset": self.dataset_name}
        if self.is_evaluation_mode:
            self._evaluate(samples, facts)
        else:
            self._trace(samples, {**facts, "model": self._model_name()})

    def _connect(self) -> None:
        if self._weave is not None:
            return
        weave = import_module("weave")
        run = active_wandb_run()
        project = self.project_name or getattr(run, "project", None)
        if project is None and weave.get_client() is None:
            raise ValueError("WeaveCallback needs a project, got None. Pass `project_name`, or start a wandb run.")
        if project is not None:
            weave.init(project)
        self._weave = weave

    def _trace(self, samples: list[Sample], facts: dict[str, object]) -> None:
        @self._weave.op(name="generate_completion")
        def generate_completion(prompt: str, completion: str) -> dict[str, str]:
            return {"prompt": prompt, "completion": completion}

        with self._weave.attributes(facts):
            for sample in samples:
                generate_completion(sample.prompt, sample.completion)

    def _evaluate(self, samples: list[Sample], facts: dict[str, object]) -> None:
        logger = self._weave.EvaluationLogger(
            model=self._model_name(), dataset=self.dataset_name, eval_attributes=facts
        )
        totals: dict[str, list[float]] = {}
        for sample in samples:
            prediction = logger.log_prediction(inputs={"prompt": sample.prompt}, output=sample.completion)
            for name, scorer in self.scorers.items():
                score = scorer(sample.prompt, sample.completion)
                prediction.log_score(name, score)
                for key, value in _numbers(name, score):
                    totals.setdefault(key, []).append(value)
            prediction.finish()
        logger.log_summary({**facts, **{name: sum(values) / len(values) for name, values in totals.items()}})

    def _model_name(self) -> str:
        path = getattr(getattr(self.trainer.model, "config", None), "_name_or_path", "")
        return self.model_name or (path or type(self.trainer.model).__name__).rstrip("/").split("/")[-1]


def _numbers(name: str, score: object) -> list[tuple[str, float]]:
    """Numeric parts of a score: itself, or the numeric items of a dict under `name.key`."""
    items = {f"{name}.{key}": value for key, value in score.items()} if isinstance(score, dict) else {name: score}
    return [(key, float(value)) for key, value in items.items() if isinstance(value, (int, float))]
