"""`trl quickstart`: the task is honest, the data train what they should, what is measured is what is said."""

import random
import subprocess
import sys

import pytest
import torch
from transformers import LlamaForSequenceClassification

from trl.data.rendering import Chat, render_prompt
from trl.data.spans import assistant_tokens
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine
from trl.scripts.quickstart import main
from trl.scripts.quickstart.evaluation import exact_match, kl_divergence, mean_reward, prompt_ids
from trl.scripts.quickstart.methods import DEFAULT_METHOD, FINE_TUNED, METHODS, REWARDED
from trl.scripts.quickstart.model import END, build_model, build_tokenizer, count_parameters
from trl.scripts.quickstart.online import is_right, prompts_with_answers
from trl.scripts.quickstart.pairs import make_pairs, sample_replies
from trl.scripts.quickstart.pipeline import STAGES, default_task
from trl.scripts.quickstart.task import PHRASINGS, Problem, Task, make_task


@pytest.fixture(scope="module")
def task() -> Task:
    return default_task(seed=0)


@pytest.fixture(scope="module")
def tokenizer(task: Task):
    return build_tokenizer(message["content"] for row in task.train_rows() for message in row["messages"])


def test_held_out_sums_are_trained_on_in_no_order_or_phrasing(task: Task):
    trained = {frozenset((problem.left, problem.right)) for problem in task.problems}
    held_out = [frozenset((problem.left, problem.right)) for problem in task.held_out]
    assert not trained & set(held_out)
    assert len(held_out) == len(set(held_out)) == 300
    questions = {row["messages"][0]["content"] for row in task.train_rows()}
    assert not questions & {task.question(problem) for problem in task.held_out}


def test_a_task_with_shared_problems_is_refused():
    with pytest.raises(ValueError, match=r"held-out problems must not be trained on, got 1 .*\(23, 48\)"):
        Task(problems=(Problem(23, 48),), held_out=(Problem(48, 23, phrasing=2),))


@pytest.mark.parametrize("held_out", [0, 10_000])
def test_the_number_of_held_out_problems_is_checked(held_out: int):
    with pytest.raises(ValueError, match="held_out must lie between"):
        make_task(largest_sum=99, held_out=held_out, seed=0)


def test_rows_are_conversations_with_right_answers(task: Task):
    rows = task.train_rows()
    assert len(rows) == len(task.problems)
    for row in rows[:500]:
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        left, right = [
            int(word.strip("?.")) for word in user["content"].split() if word.strip("?.").isdigit()
        ]
        assert assistant["content"] == str(left + right)
    assert {problem.phrasing for problem in task.problems} == set(range(len(PHRASINGS)))


def test_the_task_follows_its_seed(task: Task):
    assert default_task(seed=0) == task
    assert default_task(seed=1).held_out != task.held_out


@pytest.mark.parametrize(
    ("reply", "correct"),
    [
        ("71", True),
        (" 71\n", True),
        ("171", False),
        ("7", False),
        ("71 71", False),
        ("", False),
        ("071", False),
    ],
)
def test_the_checker(task: Task, reply: str, correct: bool):
    assert task.is_correct(Problem(23, 48), reply) is correct


def test_the_reward_is_that_of_the_checker(task: Task):
    rows = prompts_with_answers(task)[:3]
    assert [row["answer"] for row in rows] == [task.answer(problem) for problem in task.problems[:3]]
    replies = [rows[0]["answer"], f" {rows[1]['answer']}\n", rows[2]["answer"] + "1"]
    said = [[{"role": "assistant", "content": reply}] for reply in replies]
    answers = [row["answer"] for row in rows]
    assert is_right(said, answers, prompts=[]) == is_right(replies, answers) == [1.0, 1.0, 0.0]


def test_the_trained_tokens_are_the_answer_and_the_stop_token(task: Task, tokenizer):
    messages = task.messages(Problem(23, 48, phrasing=0))
    tokens = assistant_tokens(tokenizer, Chat(messages))
    trained = [token for token, on in zip(tokens.input_ids, tokens.mask, strict=True) if on]
    assert tokenizer.convert_ids_to_tokens(trained) == ["7", "1", END]
    assert tokenizer.eos_token == END
    assert tokenizer.pad_token != END


def test_the_tokenizer_reads_digits_one_by_one_and_loses_nothing(tokenizer):
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    text = "Grüße, 12 Bäume\n\n  für 3 €"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_model_is_small_and_follows_its_seed(tokenizer):
    one, same, other = (build_model(tokenizer, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all((one[name] == same[name]).all() for name in one)
    assert not all((one[name] == other[name]).all() for name in one)
    assert 200_000 <= count_parameters(build_model(tokenizer, seed=0)) <= 2_000_000


def test_replies_do_not_depend_on_the_batch(task: Task, tokenizer):
    model = build_model(tokenizer, seed=0).train()
    problems = task.held_out[:10]
    whole = exact_match(model, tokenizer, problems, 10, task=task)
    assert exact_match(model, tokenizer, problems, 3, task=task) == whole
    assert whole.accuracy == 0.0
    assert model.training


def test_a_reply_ends_with_its_stop_token_and_turns_are_apart(task: Task, tokenizer):
    """Nothing stands behind the stop token, so that a reward model scores where a policy stops."""
    first, second = Problem(23, 48), Problem(2, 3, phrasing=1)
    one = tokenizer.apply_chat_template(task.messages(first), tokenize=False)
    assert one.endswith("assistant\n71" + END)
    both = tokenizer.apply_chat_template([*task.messages(first), *task.messages(second)], tokenize=False)
    assert both.startswith(one + "\n<|im_start|>user\n")
    prompt = render_prompt(tokenizer, Chat(task.prompt_messages(first)))
    assert one == prompt + "71" + END


@pytest.mark.parametrize("place", [1, 10])
def test_slips_are_the_right_number_but_for_one_digit(task: Task, place: int):
    draw = random.Random(0)
    for left, right in [(0, 0), (5, 7), (50, 49)]:
        slips = {int(task.slip(Problem(left, right), place, draw)) for _ in range(200)}
        assert len(slips) == 9
        for slip in slips:
            assert not task.is_correct(Problem(left, right), str(slip))
            assert 0 <= slip <= 99
            assert slip % 10 == (left + right) % 10 or place == 1
            assert slip // 10 == (left + right) // 10 or place == 10


def test_pairs_are_right_answers_and_wrong_ones_the_model_s_own_among_them(task: Task, tokenizer):
    model = build_model(tokenizer, seed=0)
    problems = task.problems[:20]
    rows = make_pairs(model, tokenizer, problems, task=task, seed=3)
    torch.manual_seed(5)
    assert make_pairs(model, tokenizer, problems, task=task, seed=3) == rows
    assert make_pairs(model, tokenizer, problems, task=task, seed=4) != rows
    assert len(rows) == 60
    own = sample_replies(model, tokenizer, problems, task=task, copies=4, seed=3)
    for index, problem in enumerate(problems):
        three = rows[3 * index : 3 * index + 3]
        assert all(row["prompt"] == task.prompt_messages(problem) for row in three)
        assert all(task.is_correct(problem, row["chosen"][0]["content"]) for row in three)
        wrong = [row["rejected"][0]["content"] for row in three]
        assert wrong[0] in {reply.strip() for reply in own[index]}
        assert not any(task.is_correct(problem, answer) for answer in wrong)
        assert len(set(wrong)) == 3


def test_of_a_model_that_errs_never_there_are_slips_alone(task: Task, tokenizer, monkeypatch):
    right = [[task.answer(problem)] * 4 for problem in task.problems[:10]]
    monkeypatch.setattr("trl.scripts.quickstart.pairs.sample_replies", lambda *_, **__: right)
    rows = make_pairs(build_model(tokenizer, seed=0), tokenizer, task.problems[:10], task=task, seed=0)
    assert len(rows) == 20
    off = [abs(int(row["chosen"][0]["content"]) - int(row["rejected"][0]["content"])) for row in rows]
    assert all(0 < units < 10 for units in off[::2])
    assert all(tens % 10 == 0 and tens > 0 for tens in off[1::2])


def test_the_distance_from_a_reference_is_the_sum_over_positions(task: Task, tokenizer):
    """Against a forward per answer, without padding; float32, to 1e-4."""
    model, other = build_model(tokenizer, seed=0), build_model(tokenizer, seed=1)
    problems = task.held_out[:6]

    def distance(reference):
        return kl_divergence(model, reference, tokenizer, problems, task=task, seed=0)

    assert distance(model) == pytest.approx(0.0, abs=1e-5)
    replies = sample_ids(model, tokenizer, problems, task)
    total = 0.0
    for problem, reply in zip(problems, replies, strict=True):
        prompt = prompt_ids(tokenizer, task, problem)
        ids = torch.tensor([prompt + reply])
        with torch.no_grad():
            mine, its = (one(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for one in (model, other))
        total += (mine.exp() * (mine - its)).sum().item()
    assert distance(other) == pytest.approx(total / len(problems), rel=1e-4)
    assert total > 1.0


def sample_ids(model, tokenizer, problems, task):
    prompts = [prompt_ids(tokenizer, task, problem) for problem in problems]
    found = TransformersEngine(model).generate(prompts, Sampling(max_new_tokens=8, seed=0))
    return [completion.ids for completion in found]


def test_the_mean_reward_is_that_of_whole_answers(task: Task, tokenizer):
    config = build_model(tokenizer, seed=0).config
    config.num_labels = 1
    torch.manual_seed(0)
    reward_model = LlamaForSequenceClassification(config)
    problems, replies = task.held_out[:3], ["7", "12", "123"]
    scores = []
    for problem, reply in zip(problems, replies, strict=True):
        chat = [*task.prompt_messages(problem), {"role": "assistant", "content": reply}]
        ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), return_tensors="pt")["input_ids"]
        scores.append(reward_model(ids).logits.item())
    found = mean_reward(reward_model, tokenizer, problems, replies, task=task)
    assert found == pytest.approx(sum(scores) / 3, abs=1e-5)


def test_methods_share_their_preparation_and_every_stage_exists():
    assert DEFAULT_METHOD in METHODS
    for method, stages in METHODS.items():
        assert stages in ((*FINE_TUNED, method), (*REWARDED, method))
        assert ("reward" in stages) == (method in ("ppo", "dpo"))
    assert set(STAGES) == {stage for stages in METHODS.values() for stage in stages}
    assert all(stage.name == name for name, stage in STAGES.items())


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom trl.scripts.quickstart import main\n"
        "try: main(['--help'])\nexcept SystemExit as stop: assert stop.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"--max_steps", "--method"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    "options", [["--max_steps", "0"], ["--output_dir", __file__], ["--method", "guessing"]]
)
def test_bad_options_end_with_status_2(options: list[str]):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2
