from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ajusta.base.errors import ConfigError
from ajusta.base.units import GIB
from ajusta.spec.config import Config, describe, load_config
from ajusta.spec.settings_file import write_value

GIVEN = {"model": "m", "data": "book.txt"}


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(file: Path | None = None, overrides: dict[str, object] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides or {})
    return str(caught.value)


def test_a_file_is_read_by_the_schema(tmp_path: Path) -> None:
    text = "model: m\ndata: [a.txt, b]\noptimizer:\n  learning_rate: 2e-4\nlora: {r: 8, targets: [q_proj]}\nepochs: 2\n"
    config = load_config(write(tmp_path, text))
    assert config.data == (Path("a.txt"), Path("b"))
    assert config.optimizer.learning_rate == 2e-4
    assert (config.lora.r, config.lora.targets, config.epochs) == (8, ("q_proj",), 2)


def test_what_yaml_would_misread_stays_what_was_written(tmp_path: Path) -> None:
    text = "model: m\ndata: no\nrevision: 1e10\ntext:\n  system: yes\nbits: none\nstop_after: 1:30\n"
    assert "stop_after is '1:30'" in refusal(write(tmp_path, text))
    config = load_config(write(tmp_path, text.replace("stop_after: 1:30\n", "")))
    assert (config.data, config.revision, config.text.system) == ((Path("no"),), "1e10", "yes")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "model: m\ndata: d\nepochs: 7\nlora:\n  r: 4\n  alpha: 8\n")
    config = load_config(file, {"lora.r": "32", "steps": 10})
    assert (config.lora.r, config.lora.alpha, config.steps) == (32, 8.0, 10)
    assert load_config(file, {"lora": {"r": 5}}).lora.r == 5


def test_epochs_as_a_flag_lift_the_steps_of_the_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "model: m\ndata: d\nsteps: 7\n"), {"epochs": 2})
    assert (config.steps, config.epochs) == (None, 2)


def test_all_mistakes_come_at_once_with_line_and_nearest_name(tmp_path: Path) -> None:
    text = (
        "model: x\ndata: d\nlearning_rate: 2e-4\nlora:\n  r: big\n  rnk: 8\n  r: 4\noptimizer:\n  schedule: cosin\n"
        "memory: 10Gib3\nbits: 4\ntext: 5\nmicro_batch: 20\nlora_alpha: 3\ndtype: [a, {b: c}]\n"
    )
    message = refusal(write(tmp_path, text), {"epochs": "x"})
    for expected in (
        "12 settings are wrong",
        ":3: there is no setting 'learning_rate'; did you mean 'optimizer.learning_rate'?",
        ":5: lora.r is 'big'; expected a whole number, 1 or more",
        ":6: there is no setting 'lora.rnk'; did you mean 'lora.r'?",
        ":7: 'lora.r' is given a second time (first in line 5)",
        ":9: optimizer.schedule is 'cosin'; expected one of cosine, linear, constant; did you mean 'cosine'?",
        ":10: memory is '10Gib3'; expected auto, or a size such as 10GiB",
        ":11: bits is '4'; expected one of none, int8, nf4; did you mean 'nf4'?",
        ":12: 'text' is a group of settings",
        ":13: micro_batch (20) is larger than batch_size (8)",
        ":14: there is no setting 'lora_alpha'; did you mean 'lora.alpha'?",
        ":15: dtype is nested deeper than any setting goes",
        "epochs is 'x'; expected a whole number, 1 or more",
    ):
        assert expected in message
    lines = [int(line.split(":")[1]) for line in message.splitlines()[1:-1]]
    assert lines == sorted(lines)


def test_every_setting_refuses_a_nonsense_value_by_name() -> None:
    free = {"model", "revision", "out", "lora.adapter", "data", "exam", "text.system", "lora.targets", "lora.exclude"}
    for row in describe():
        message = refusal(None, {**GIVEN, row.name: {"deep": {"er": 1}} if row.name in free else "nonsense"})
        assert row.name in message, message
        assert "expected" in message or "there is no setting" in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"steps": 5, "epochs": 2}, "steps and epochs are both given"),
        ({"text.overlap": 2000}, "leaves no room in max_length"),
        ({"early_stopping": 2}, "give evaluate_every too"),
        ({"evaluate_every": 5, "text.heldout_fraction": 0}, "text.heldout_fraction is 0"),
        ({"batch_size": True}, "batch_size is true; expected a whole number"),
        ({"optimizer.learning_rate": "nan"}, "optimizer.learning_rate is 'nan'; expected a number, above 0"),
        ({"optimizer.learning_rate": None}, "optimizer.learning_rate is empty"),
        ({"data": [""]}, "data is ['']"),
        ({"memory": 0}, "memory is 0; expected auto, or a size"),
        ({"lora": 16}, "'lora' is a group of settings, not one; expected lora.NAME with one of: r, alpha"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: dict[str, object], expected: str) -> None:
    assert expected in refusal(None, {**GIVEN, **overrides})


def test_a_wrong_value_raises_no_follow_up_mistake() -> None:
    message = refusal(None, {**GIVEN, "early_stopping": 2, "evaluate_every": "often"})
    assert "evaluate_every is 'often'" in message
    assert "give evaluate_every too" not in message


def test_origins_name_the_flag() -> None:
    with pytest.raises(ConfigError, match="--epochs: epochs is 'three'"):
        load_config(None, {**GIVEN, "epochs": "three"}, origins={"epochs": "--epochs"})


def test_missing_model_and_data_are_named_with_the_flag() -> None:
    message = refusal(None, {"bits": "5"})
    assert "model is missing; give --model NAME" in message
    assert "data is missing; give --data PATH" in message
    assert "bits is '5'" in message
    assert load_config(None, {"model": "m"}, required=("model",)).data == ()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"model: [a\n", ":2: is no YAML"),
        (b"- a\n- b\n", ":1: holds no settings"),
        (b"model: \xff\n", "is not UTF-8"),
        (b"? [a, b]\n: c\n", ":1: a list or mapping stands where a setting's name is expected"),
        (b"lora.r: 8\nlora: {r: 4}\nmodel: m\ndata: d\n", ":2: 'lora.r' is given a second time"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert expected in refusal(path)


def test_a_file_that_is_not_there_is_refused_and_an_empty_one_is_fine(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "none.yaml")
    assert "cannot be read" in refusal(tmp_path)
    assert load_config(write(tmp_path, "# nothing\n"), GIVEN).model == "m"


def test_sizes_and_durations() -> None:
    config = load_config(None, {**GIVEN, "memory": "10GiB", "stop_after": "1h30m"})
    assert (config.memory_bytes, config.stop_after_seconds) == (10 * GIB, 5400.0)
    assert load_config(None, {**GIVEN, "memory": 6_000_000_000, "stop_after": 90}).stop_after_seconds == 90.0
    assert load_config(None, GIVEN).memory_bytes is None


def test_numbers_and_words_of_the_mixed_settings() -> None:
    config = load_config(None, {**GIVEN, "gradient_checkpointing": "12", "micro_batch": 2, "lora.targets": "q, v"})
    assert (config.gradient_checkpointing, config.micro_batch, config.lora.targets) == (12, 2, ("q", "v"))
    assert "gradient_checkpointing" in refusal(None, {**GIVEN, "gradient_checkpointing": -1})


def test_the_run_folder_is_the_same_whenever_the_settings_are() -> None:
    assert load_config(None, GIVEN).run_folder == Path("runs/book-m")
    assert load_config(None, {**GIVEN, "out": "x"}).run_folder == Path("x")
    assert load_config(None, {"model": "org/A B.gguf", "data": "my data (1)"}).run_folder == Path("runs/my-data-1-A-B")


def test_a_config_is_frozen_and_takes_no_unknown_name() -> None:
    config = load_config(None, GIVEN)
    with pytest.raises(ValidationError):
        config.epochs = 5  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Config(model="m", epoch=5)  # type: ignore[call-arg]


def test_the_effective_config_reads_back_the_same(tmp_path: Path) -> None:
    for overrides in ({}, {"steps": 5}, {"epochs": 2, "lora.adapter": "~/a", "stop_after": "3h", "memory": "1.5 GiB"}):
        config = load_config(None, {**GIVEN, **overrides})
        assert load_config(write(tmp_path, config.to_yaml())) == config


def test_the_effective_config_says_unit_and_help_of_every_setting() -> None:
    text = load_config(None, GIVEN).to_yaml()
    for row in describe():
        line = next(line for line in text.splitlines() if line.lstrip("# ").startswith(f"{row.name.split('.')[-1]}:"))
        assert row.help in line
        assert f"[{row.unit}]" in line or not row.unit


# Surrogates and NUL cannot stand in a path or in YAML; everything else that a person can name a file must survive.
awkward = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1).filter(str.strip)


@given(data=st.lists(awkward, min_size=1, max_size=3), system=awkward)
def test_any_text_survives_the_file(tmp_path_factory: pytest.TempPathFactory, data: list[str], system: str) -> None:
    config = load_config(None, {"model": "m", "data": data, "text.system": system})
    path = write(tmp_path_factory.mktemp("round"), config.to_yaml())
    assert load_config(path) == config


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_is_written_exactly(number: float) -> None:
    assert float(write_value(number)) == number


def test_the_schema_is_there_for_editors() -> None:
    schema = Config.model_json_schema()
    assert schema["properties"]["max_length"]["unit"] == "tokens"
    assert all("description" in part for part in schema["properties"].values())
