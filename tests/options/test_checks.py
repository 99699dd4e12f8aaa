import pytest

from trl.options.checks import check_at_least, check_one_of, json_object


@pytest.mark.parametrize("value", [None, 1, 7])
def test_check_at_least_passes_good_values(value):
    check_at_least("max_length", value, minimum=1)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, r"max_length must be a whole number >= 1 or None, got 0\. Use None"),
        (-3, ValueError, "got -3"),
        (1.5, TypeError, r"got 1\.5 \(float\)"),
        ("8", TypeError, r"got '8' \(str\)"),
        (True, TypeError, r"got True \(bool\)"),
    ],
)
def test_check_at_least_names_what_is_wrong(value, error, message):
    with pytest.raises(error, match=message):
        check_at_least("max_length", value, minimum=1, hint="Use None.")


def test_check_at_least_can_forbid_none():
    with pytest.raises(TypeError, match="a whole number >= 1, got None"):
        check_at_least("lora_r", None, minimum=1, optional=False)


def test_check_one_of_lists_what_is_allowed():
    check_one_of("loss_type", "nll", ("nll", "dft"))
    check_one_of("dtype", None, ("auto",), optional=True)
    with pytest.raises(ValueError, match="loss_type must be one of 'nll', 'dft', got 'mse'"):
        check_one_of("loss_type", "mse", ("nll", "dft"))


def test_json_object_reads_text_and_keeps_dicts():
    given = {"a": 1}
    assert json_object("kwargs", given) is given
    assert json_object("kwargs", None) is None
    assert json_object("kwargs", '{"dtype": "float32", "n": [1, 2]}') == {"dtype": "float32", "n": [1, 2]}


@pytest.mark.parametrize("text", ["{broken", "[1, 2]", "3", "float32"])
def test_json_object_rejects_other_text(text):
    with pytest.raises(ValueError, match="kwargs must be a JSON object"):
        json_object("kwargs", text)


def test_json_object_rejects_other_types():
    with pytest.raises(TypeError, match="got list"):
        json_object("kwargs", [1])  # pyright: ignore[reportArgumentType]


def test_warnings_about_settings_point_at_the_users_line(tmp_path):
    from trl import CPOConfig, DPOConfig, RewardConfig

    folder = str(tmp_path)
    with pytest.warns(Warning) as caught:
        DPOConfig(folder, use_cpu=True, label_smoothing=0.1, loss_type="ipo")
        CPOConfig(folder, use_cpu=True, simpo_gamma=0.1)
        RewardConfig(folder, use_cpu=True, evaluation_strategy="no")
    assert [warning.filename for warning in caught] == [__file__] * 3
