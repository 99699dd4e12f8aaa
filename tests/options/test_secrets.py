"""Secrets are recognised by their names and by their form, and vocabulary is not taken for one."""

import copy
import pickle
from dataclasses import dataclass

import pytest

from trl import DPOConfig, GRPOConfig, PPOConfig
from trl.options.checks import json_object
from trl.options.secrets import REDACTED, redacted
from trl.options.shared import changed_settings

HUB = "hf_" + "aB3" * 12
SECRET = "s3cret"


@pytest.mark.parametrize(
    "key",
    ["token", "hub_token", "HF_TOKEN", "use_auth_token", "api_key", "apikey", "x-api-key", "OPENAI_API_KEY", "secret", "password",
     "Authorization", "aws_secret_access_key", "wandb/api_key", "credentials", "aws_session_token", "refresh_token"],
)  # fmt: skip
def test_the_text_under_the_key_of_a_secret_is_redacted(key):
    nested = {"outer": [{key: SECRET, "dtype": "bfloat16"}]}
    assert redacted(nested) == {"outer": [{key: REDACTED, "dtype": "bfloat16"}]}
    assert nested["outer"][0][key] == SECRET
    assert redacted({key: True, "other": None}) == {key: True, "other": None}


@pytest.mark.parametrize(
    "text",
    [HUB, "sk-proj-" + "x" * 24, "ghp_" + "x" * 36, "f" * 40, f"https://me:{SECRET}@host/v1", f"https://me:{SECRET}/#@host:8000", f"Bearer {SECRET}",
     f'{{"token": "{SECRET}"}}', f"got hub_token={SECRET}.", f"https://host/v1?api_key={SECRET}&n=1",
     f"agent --api-key {SECRET} --stop-token x", f"agent --token {SECRET}", f"agent --token={SECRET}"],
)  # fmt: skip
def test_text_that_looks_like_a_secret_is_redacted_under_any_key(text):
    shown = redacted({"note": text})["note"]
    assert REDACTED in shown
    assert SECRET not in shown and text not in shown


@pytest.mark.parametrize(
    ("key", "value"),
    [("pad_token", "<pad>"), ("eos_token", "<|im_end|>"), ("revision", "f" * 40), ("output_dir", "hf_sft_run_2026_11_24"),
     ("max_tokens", "7"), ("dataset_text_field", "text"), ("image_key", "image"), ("note", "agent --stop-token x"), ("cls-token", "[CLS]"), ("model_name_or_path", "sk-learn/gpt2")],
)  # fmt: skip
def test_what_is_no_secret_stays(key, value):
    assert redacted({key: value}) == {key: value}


def test_configs_are_written_without_secrets(tmp_path):
    inner = {"token": SECRET, "headers": {"Authorization": f"Bearer {SECRET}"}, "dtype": "float32"}
    args = DPOConfig(
        str(tmp_path), use_cpu=True, hub_token=HUB, model_init_kwargs=inner, ref_model_init_kwargs=dict(inner)
    )
    shown = args.to_dict()
    for text in (
        str(shown),
        str(args.to_sanitized_dict()),
        args.to_json_string(),
        str(changed_settings(args)),
    ):
        assert SECRET not in text and HUB not in text
    assert shown["model_init_kwargs"]["dtype"] == "float32"
    assert args.model_init_kwargs is inner and inner["token"] == SECRET
    assert copy.deepcopy(args).hub_token == pickle.loads(pickle.dumps(args)).hub_token == HUB  # Ray sends it so
    server = GRPOConfig(str(tmp_path), use_cpu=True, vllm_server_base_url=f"http://me:{SECRET}@host:8000")
    assert SECRET not in str(server.to_dict())
    loop = PPOConfig(push_to_hub_if_best_kwargs={"repo_id": "me/x", "token": SECRET})
    assert SECRET not in str(loop.to_dict())


@dataclass
class ConfigOfAProgram(DPOConfig):
    api_token: str | None = None


def test_fields_of_a_subclass_are_secrets_by_their_names(tmp_path):
    shown = ConfigOfAProgram(str(tmp_path), use_cpu=True, api_token=SECRET, pad_token="<pad>").to_dict()
    assert (shown["api_token"], shown["pad_token"]) == (REDACTED, "<pad>")


def test_errors_do_not_show_them():
    with pytest.raises(ValueError, match="must be a JSON object, got") as raised:
        json_object("model_init_kwargs", f'{{"token": "{SECRET}", }}')
    assert SECRET not in str(raised.value)
