from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ajusta.base.errors import ModelError
from ajusta.data.tokenizer import end_token_ids, load_tokenizer, save_tokenizer

TEMPLATE = "{% for message in messages %}{{ message['content'] }} \u00e9\n{% endfor %}"


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1, "one": 2, "two": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


def test_a_saved_tokenizer_has_its_template_in_both_places(tmp_path):
    save_tokenizer(make_tokenizer(), tmp_path / "new")
    folder = tmp_path / "new"
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == (folder / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert load_tokenizer(folder).chat_template == TEMPLATE
    assert AutoTokenizer.from_pretrained(folder).encode("one two") == [2, 3]
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(folder).chat_template == TEMPLATE


def test_a_tokenizer_without_template_is_saved_without(tmp_path):
    save_tokenizer(make_tokenizer(None), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert load_tokenizer(tmp_path).chat_template is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not readable as JSON"),
        ("[]", "has no tokenizer model in it"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "the merge 'a b' is of no token"),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
            r"the merge \['a', 'b'\] is of no token",
        ),
    ],
)
def test_a_broken_tokenizer_is_one_line(tmp_path, text, message):
    save_tokenizer(make_tokenizer(), tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_broken_tokenizer_config_is_one_line(tmp_path):
    save_tokenizer(make_tokenizer(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="has a tokenizer that cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_tokenizer_says_so(tmp_path):
    with pytest.raises(ModelError, match=r"has no tokenizer file; expected tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="is no folder"):
        load_tokenizer(tmp_path / "nothing")


def test_code_of_the_folder_is_never_run(tmp_path):
    save_tokenizer(make_tokenizer(), tmp_path)
    path = Path(tmp_path / "tokenizer_config.json")
    config = json.loads(path.read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    path.write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('the code of the folder was run')")
    try:
        assert load_tokenizer(tmp_path).encode("one") == [2]
    except ModelError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, (1,)),
        ({"eos_token_id": 3}, (3, 1)),
        ({"eos_token_id": [3, 2]}, (3, 2, 1)),
        ({"eos_token_id": [1, 2]}, (1, 2)),
    ],
)
def test_every_end_token_counts(generation, expected):
    assert end_token_ids(make_tokenizer(), generation) == expected


def test_end_tokens_that_are_none_are_refused():
    for value in (4, -1, "</s>", True, [1, None]):
        with pytest.raises(ModelError, match="expected ids of the vocabulary"):
            end_token_ids(make_tokenizer(), {"eos_token_id": value})
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="neither generation_config nor the tokenizer"):
        end_token_ids(tokenizer, {})
