"""Files and folders: what is read, and that nothing is passed over in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ajusta.base.errors import DataError
from ajusta.data.readers import read

QA = {"question": "Where?", "answer": "Here."}


def _write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_folder_is_read_in_order_and_everything_is_accounted_for(tmp_path: Path) -> None:
    folder = tmp_path / "my data (1) über"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "config.txt").write_text("x")
    (folder / ".hidden.txt").write_text("x")
    (folder / "b.txt").write_text("Second.")
    (folder / "a'#.md").write_text("First.")
    (folder / "sub" / "c.TXT").write_text("Third.")
    (folder / "notes.xyz").write_text("?")
    (folder / "empty.txt").write_text("")
    reading = read([folder])
    assert [row.text for row in reading.rows] == ["First.", "Second.", "Third."]
    assert reading.rows[2].source == "my data (1) über/sub/c.TXT:1"
    assert reading.files == 3
    assert {(item.source.split("/")[-1], item.reason.split(";")[0]) for item in reading.dropped} == {
        ("notes.xyz", "unknown type .xyz"),
        ("empty.txt", "the file is empty"),
    }
    assert "hidden files skipped: 2" in reading.notes


def test_bad_rows_are_named_and_good_rows_used(tmp_path: Path) -> None:
    path = tmp_path / "ok.jsonl"
    lines = [
        json.dumps(QA),
        "",
        '{"question": "a", "answer": null}',
        '{"question": "b", "answer": "  "}',
        '{"question": "c", "answer": 46}',
        '{"question": "d", "answer": true}',
        "[1, 2]",
        '{"other": "e"}',
        '{"question": "f", "answer": "x\\u0000y"}',
        '{"question": "g", "answer": "\\ud800"}',
        '{"question": "h", "ans',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    reading = read([path])
    assert [row.source for row in reading.rows] == ["ok.jsonl:1", "ok.jsonl:5"]
    assert reading.rows[1].messages is not None and reading.rows[1].messages[1]["content"] == "46"
    reasons = {item.source: item.reason for item in reading.dropped}
    assert [int(source.split(":")[1]) for source in reasons] == [3, 4, 6, 7, 8, 9, 10, 11]
    for line, word in {
        3: "null",
        4: "blank",
        6: "bool",
        7: "list",
        8: "other",
        9: "NUL",
        10: "surrogate",
        11: "JSON",
    }.items():
        assert word in reasons[f"ok.jsonl:{line}"]
    assert "answer is a number, read as text: 1" in reading.notes
    assert "blank lines skipped: 1" in reading.notes
    with pytest.raises(DataError, match=r"8 items.*\n.*ok\.jsonl:3"):
        read([path], strict=True)


def test_nothing_usable_and_missing_paths_are_errors(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[[1, 2], [3]]")
    with pytest.raises(DataError, match=r"no usable row.*\n.*list\.json:1"):
        read([tmp_path / "list.json"])
    with pytest.raises(DataError, match="no usable row"):
        read([])
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(DataError, match=r"did you mean 'corpus\.txt'"):
        read([tmp_path / "corpsu.txt"])


def test_same_file_twice_is_read_once_and_equal_names_stay_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    first, second = tmp_path / "one" / "a.txt", tmp_path / "two" / "a.txt"
    reading = read([first, tmp_path / "one", second])
    assert [row.text for row in reading.rows] == ["one", "two"]
    assert len({row.source for row in reading.rows}) == 2
    assert "files given twice, read once: 1" in reading.notes


def test_broken_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert [item.source.split("/")[-1] for item in read([tmp_path]).dropped] == ["gone.txt"]


ROWS = "\n".join(
    json.dumps({"question": q, "answer": a}, ensure_ascii=False) for q, a in [("¿Qué?", "“Sí” — año"), ("2", "b")]
)


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r", "mixed"])
@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_encodings_and_line_ends_give_identical_rows(tmp_path: Path, codec: str, ends: str) -> None:
    plain = _write(tmp_path / "plain.jsonl")
    plain.write_text(ROWS, encoding="utf-8")
    text = ROWS.replace("\n", "\r\n") + "\n" if ends == "mixed" else ROWS.replace("\n", ends)
    other = tmp_path / "other.jsonl"
    other.write_bytes(text.encode(codec))
    expected, got = read([plain]), read([other])
    assert [row.messages for row in got.rows] == [row.messages for row in expected.rows]
    assert any("read as" in note for note in got.notes) == (codec != "utf-8")
    csv_file = tmp_path / "t.csv"
    csv_file.write_bytes('Question ,Answer\n¿Qué?,"“Sí” — año"\n2,b\n'.replace("\n", "\r\n").encode(codec))
    assert [row.messages for row in read([csv_file]).rows] == [row.messages for row in expected.rows]


def test_unicode_separators_emoji_and_combining_marks_stay(tmp_path: Path) -> None:
    answer = "a\u2028b\u0085c \U0001f41f e\u0301 \x0b"
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": answer}, ensure_ascii=False) + "\n", encoding="utf-8")
    messages = read([path]).rows[0].messages
    assert messages is not None and messages[1]["content"] == answer


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("good é ü ñ text ".encode() + b"\xff broken", "broken byte 0xff at offset 19"),
        (b"x\x81y", "0x81 at offset 1"),
        (b"\xff\xfea\x00\x00\xd8", "UTF-16 LE, but byte 4"),
        ("wide".encode("utf-16-le"), "NUL byte at offset 1"),
        (b"text with one \0 in it", "NUL byte at character 14"),
    ],
)
def test_undecodable_bytes_give_file_and_offset(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "bad.txt").write_bytes(data)
    (tmp_path / "good.txt").write_text("fine")
    reading = read([tmp_path])
    assert len(reading.rows) == 1
    assert "bad.txt" in reading.dropped[0].source
    assert words in reading.dropped[0].reason


def test_line_ends_of_documents_become_newlines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n  four\t")
    assert read([tmp_path]).rows[0].text == "one\ntwo\nthree\n  four\t"


def test_json_list_has_lines_and_gives_rows_before_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    path.write_text(json.dumps([QA, QA, {"text": "doc"}], indent=1))
    reading = read([path])
    assert [row.source for row in reading.rows] == ["l.json:2", "l.json:6", "l.json:10"]
    assert reading.rows[2].text == "doc"
    path.write_text(json.dumps([QA, QA], indent=1)[:-30])
    cut = read([path])
    assert len(cut.rows) == 1 and "the rest of the file was not read" in cut.dropped[0].reason
    path.write_text(json.dumps([QA, QA])[:-1])
    cut = read([path])
    assert len(cut.rows) == 2 and "cut off" in cut.dropped[0].reason


def test_json_of_one_row_a_data_list_and_lines_in_disguise(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps(QA))
    assert len(read([path]).rows) == 1
    path.write_text(json.dumps({"version": 1, "data": [QA, QA]}))
    assert [row.source for row in read([path]).rows] == ["d.json:1 (item 1)", "d.json:1 (item 2)"]
    _write(path, QA, QA)
    assert [row.source for row in read([path]).rows] == ["d.json:1", "d.json:2"]
    path.write_text("[]")
    with pytest.raises(DataError, match="no usable row"):
        read([path])
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"d\.json:1: no valid JSON"):
        read([path])
