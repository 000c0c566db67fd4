"""Files of rows that strangers send: what is wrong is told in a line, and at once."""

import csv
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lowmem_grpo.data import files
from lowmem_grpo.data.files import LONGEST, columns_of, first_rows, read_rows, refuse_unreadable
from lowmem_grpo.utils import MIB

ROW = {"prompt": "1 + 1?", "answer": "2"}
LINE = json.dumps(ROW) + "\n"


def deep(levels: int, kind: str = "{") -> str:
    return '{"prompt": "a", "answer": ' + ('{"a": ' if kind == "{" else "[") * levels + "1" + (
        "}" if kind == "{" else "]") * levels + "}"


def wide(columns: int) -> dict[str, str]:
    return {f"column{number}": "x" for number in range(columns)}


WRONG = {  # file and text: words of the refusal
    ("null.json", f"[{LINE}, null]"): "row 2 of its list is not a JSON object: null",
    ("date.json", '[{"prompt": "2020-01-01", "answer": 1e300}, null]'): "row 2 of its list is not a JSON object: null",
    ("text.json", f'[{LINE}, {LINE}, "x"]'): 'row 3 of its list is not a JSON object: "x"',
    ("list.json", f"[{LINE}, [1]]"): "row 2 of its list is not a JSON object: [1]",
    ("deep.json", f"[{LINE}, {deep(900)}]"): "row 2 of its list cannot be read: answer.a.a.a is nested more than 64",
    ("wide.json", json.dumps([wide(1001)])): "row 1 of its list brings the file to more than 1,000 columns",
    ("deepest.json", "[" * 10**5): "it is nested too deeply",
    ("null.jsonl", LINE + "null\n"): "line 2 is not a JSON object: null",
    ("deep.jsonl", LINE + deep(900) + "\n"): "line 2 cannot be read: answer.a.a.a is nested more than 64 levels deep",
    ("lists.jsonl", deep(500, "[") + "\n"): "line 1 cannot be read: answer is nested more than 64 levels deep",
    ("wide.jsonl", LINE + json.dumps(wide(10**5))): "line 2 brings the file to more than 1,000 columns; write what",
    ("spread.jsonl", "".join(json.dumps({f"{row}-{column}": 1 for column in range(100)}) + "\n" for row in range(100))):
        "line 11 brings the file to more than 1,000 columns",
    ("inner.jsonl", json.dumps({"prompt": "a", "answer": wide(10**5)})): "line 1 brings the objects in its columns to",
    ("items.jsonl", json.dumps({"prompt": "a", "answer": [{name: 1} for name in wide(6000)]})): "to more than 5,000",
    ("wide.csv", ",".join(wide(10**5)) + "\n" + "x," * 99_999 + "x\n"): "it has 100,000 columns; at most 1,000 are",
    ("row.csv", "prompt,answer\n" + "x," * 10**5 + "x\n"): "it has 100,001 columns; at most 1,000 are read",
}


@pytest.mark.parametrize(("name", "text"), WRONG, ids=lambda value: value[:12])
def test_rows_that_would_break_or_stop_the_library_are_refused_before_it_is_called(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with (patch("datasets.load_dataset", side_effect=AssertionError("it is called")),
          pytest.raises(OSError, match=f"no rows from .*{name}") as refused):
        read_rows(str(tmp_path / name))
    assert WRONG[name, text] in str(refused.value)
    assert len(str(refused.value)) < 400 and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_hole_of_gigabytes_is_found_in_its_first_bytes(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("prompt,answer\nx,y\n" if name == "a.csv" else LINE)
    os.truncate(path, 3 << 30)
    with patch.object(files, "first_lines", side_effect=AssertionError("it is read further")), \
            pytest.raises(OSError, match="it has only zeros before byte 2,097,152; copy it again"):
        refuse_unreadable(path)


def test_a_line_longer_than_any_row_is_refused_and_a_list_in_one_line_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LONGEST", MIB)
    row = json.dumps(ROW | {"more": "x" * 2 * MIB})
    for name, text in (("a.jsonl", row), ("a.csv", f"prompt,answer\n{'x' * 2 * MIB},y\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(OSError, match=r"it has a line of more than 1 MiB before byte 2,097"):
            refuse_unreadable(tmp_path / name)
    (tmp_path / "a.json").write_text(f"[{row}, {row}]")
    refuse_unreadable(tmp_path / "a.json")
    assert LONGEST == 64 * MIB


def parquet(path: Path, features: Any = None, **columns: Any) -> Path:
    table = pa.table(columns or {"prompt": ["a", "b"], "answer": ["1", "2"]})
    held = None if features is None else {"huggingface": features if isinstance(features, bytes) else json.dumps(
        {"info": {"features": features}}).encode()}
    pq.write_table(table.replace_schema_metadata(held), path)
    return path


@pytest.mark.parametrize("features", [
    {"prompt": 5}, 5, [1], {"prompt": None}, {"prompt": {"_type": "List", "feature": 5}}, {"prompt": {"_type": "Nope"}},
    {"prompt": {"_type": "Value", "dtype": "none"}}, {"prompt": {"_type": "ClassLabel", "names": 5}}, b"5", b"null",
    b"[" * 10**5, b"\xff", b"{",
], ids=lambda value: f"{value!s:.30}")
def test_broken_metadata_of_a_parquet_file_is_told_in_a_line(features: Any, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"no rows from .*a\.parquet") as refused:
        first_rows(str(parquet(tmp_path / "a.parquet", features)), "train", 2)
    assert len(str(refused.value)) < 600


def test_a_parquet_file_of_many_columns_is_refused_by_its_end(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", **{f"c{number}": [1] for number in range(5001)})
    with pytest.raises(OSError, match="it has 5,001 columns; at most 5,000 are read: leave out what"):
        read_rows(str(path))


def test_a_header_too_long_for_pythons_reader_is_left_to_the_library(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a" * (csv.field_size_limit() + 1) + ",b\n1,2\n3,4\n")
    assert columns_of(tmp_path / "a.csv") == []
    assert len(read_rows(str(tmp_path / "a.csv"))) == 2


@pytest.mark.parametrize(("name", "text"), [
    ("a.jsonl", f"{deep(60, '[')}\n{deep(60)}\n"), ("a.json", json.dumps([wide(900), wide(900)])),
    ("a.jsonl", (json.dumps(ROW | {"held": wide(900)}) + "\n") * 2), ("a.jsonl", f"\n{LINE}\n{LINE}"),
    ("a.json", f"[{LINE}, {LINE}]"), ("a.json", LINE * 2), ("a.csv", (",".join(wide(900)) + "\n") * 2),
], ids=lambda value: value[:12])
def test_deep_wide_and_usual_rows_are_still_read(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    refuse_unreadable(tmp_path / name)
    if "[[[[" not in text:  # the other line has objects where this one has lists
        assert len(read_rows(str(tmp_path / name))) == (1 if name == "a.csv" else 2)
