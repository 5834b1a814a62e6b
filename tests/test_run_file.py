"""Saved runs: an answer comes back as it was; what is no saved run is refused in one line and never overwritten."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import stat
import tempfile
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import memsize
from memsize import Finding, Fit, Report, Trace
from memsize.errors import InputError, OutputError
from memsize.records.trace import InputTensor, TensorSpec
from memsize.units import Bytes
from tests import records
from tests.records import (
    NEWEST,
    Audit,
    Budget,
    FitRow,
    FitRun,
    Remedied,
    VerifiedRun,
    coder,
    is_run_file,
    read_data,
    read_run,
    run_file,
    write_run,
)


def round_trip(record: Any) -> Any:
    kind: Any = type(record)
    return coder(kind).read(json.loads(json.dumps(coder(kind).write(record))))


def types(value: Any) -> Any:
    """The types of a record at any depth: equal values may differ in them, `Bytes` from integers, lists from tuples."""
    if dataclasses.is_dataclass(value):
        return type(value), [types(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return type(value), [types(each) for each in value]
    if isinstance(value, Mapping):
        return Mapping, [(types(key), types(each)) for key, each in value.items()]
    return type(value)


# A report of a hundred fields is large data.
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(st.data())
@pytest.mark.parametrize("record", [Report, FitRow, Remedied, Budget, Audit, VerifiedRun, Finding])
def test_what_is_read_is_what_was_written(record: type, data: st.DataObject) -> None:
    value = data.draw(st.from_type(record))
    back = round_trip(value)
    assert back == value and types(back) == types(value)


def test_the_values_of_a_finding_keep_their_types() -> None:
    finding = Finding("code", "{size} {names}", {"size": Bytes(2**20), "names": ("x", "y"), "count": 3}, layers=("a",))
    back = round_trip(finding)
    assert type(back.values["size"]) is Bytes and type(back.values["names"]) is tuple
    assert back.text("KiB") == finding.text("KiB") == "1,024.00 KiB x and y"


def test_a_mapping_from_other_than_texts_is_a_list_of_pairs() -> None:
    runs = {FitRun("fp32", 4): records.toy(), FitRun("bf16", 2, "T4", 8): records.toy("bf16")}
    found = Fit("m", (), "batch", (), (), traces=runs)
    data = coder(Fit).write(found)
    assert [key for key, _ in data["traces"]] == [["fp32", 4, "", None], ["bf16", 2, "T4", 8]]
    assert round_trip(found) == found
    # As runs were named before there were several GPUs and batches.
    data["traces"] = [[key[:2], trace] for key, trace in data["traces"]]
    assert list(coder(Fit).read(data).traces) == [FitRun("fp32", 4), FitRun("bf16", 2)]


def test_a_type_that_no_file_can_hold_is_an_error_of_ours() -> None:
    with pytest.raises(TypeError, match=r"no value of .*complex.* can be in a file"):
        coder(complex)


def record_of(kind: str) -> type | None:
    return {"report": Report, "fit": Fit}.get(kind)


@pytest.mark.parametrize("report", [records.toy_report(), records.structures_report(), records.failing_report()])
def test_a_report_is_saved_and_read(report: Report, tmp_path: Path) -> None:
    file = tmp_path / "run.memsize"
    report.save(file)
    assert read_run(file, record_of) == report
    assert str(read_run(file, record_of)) == str(report)
    data = read_data(file)
    assert (data["schema"], data["kind"], data["memsize"]) == (f"memsize.run/{NEWEST}", "report", memsize.__version__)


def test_the_same_run_makes_the_same_file(tmp_path: Path) -> None:
    for name in ("one.memsize", "two.memsize"):
        records.toy_report().save(tmp_path / name)
    assert (tmp_path / "one.memsize").read_bytes() == (tmp_path / "two.memsize").read_bytes()


def test_a_file_is_told_by_its_suffix_or_its_content(tmp_path: Path) -> None:
    report = records.toy_report()
    report.save(tmp_path / "a.memsize")
    report.save(tmp_path / "odd name")
    (tmp_path / "model.py").write_text("x = 1")
    assert is_run_file(tmp_path / "a.memsize") and is_run_file(tmp_path / "odd name")
    assert is_run_file("missing.memsize")
    assert (
        not is_run_file(tmp_path / "model.py") and not is_run_file("package.module:Net") and not is_run_file(tmp_path)
    )
    assert not is_run_file("nul\0byte")


# -- what is refused ---------------------------------------------------------------------------------------------------


def packed(data: object) -> bytes:
    return gzip.compress(json.dumps(data).encode())


def head(**changes: object) -> dict[str, object]:
    return {"schema": f"memsize.run/{NEWEST}", "kind": "report", "memsize": "9.9", "answer": {}} | changes


NOT_OURS: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello",
    "other gzip": gzip.compress(b"hello"),
    "other json": packed({"a": 1}),
    "a list": packed([1]),
    "another schema": packed(head(schema="memsize.trace/1")),
    "no version": packed(head(schema="memsize.run/")),
    "a schema of another type": packed(head(schema=3)),
    "nested without end": gzip.compress(b"[" * 200_000),
}
DAMAGED = {
    "cut": packed(head())[:-9],
    "changed": packed(head())[:12] + b"\xff\xff" + packed(head())[14:],
    "no answer": packed({"schema": f"memsize.run/{NEWEST}", "kind": "report", "memsize": memsize.__version__}),
    "fields missing": packed(head()),
    "a wrong type": packed(head(answer={"model": 3})),
}
NEWER = {"a newer schema": packed(head(schema=f"memsize.run/{NEWEST + 1}"))}


def refused(file: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_run(file, record_of)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300 and str(file) in message
    return message


@pytest.mark.parametrize("name", NOT_OURS)
def test_a_foreign_file_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.memsize"
    file.write_bytes(NOT_OURS[name])
    assert "is not a saved run of memsize" in refused(file) or name == "empty"


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.memsize"
    file.write_bytes(DAMAGED[name])
    assert "is damaged" in refused(file)


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.memsize"
    file.write_bytes(NEWER["a newer schema"])
    assert refused(file).endswith(f"was saved by memsize 9.9, which is newer than this one ({memsize.__version__})")
    file.write_bytes(packed(head(kind="weather")))
    assert "holds a 'weather', which this memsize does not know" in refused(file)


def test_a_file_that_is_not_there_or_cannot_be_read(tmp_path: Path) -> None:
    assert refused(tmp_path / "x.memsize") == f"no such file: {tmp_path / 'x.memsize'}"
    assert "cannot read" in refused(tmp_path)


def test_a_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_file, "_MOST_BYTES", 1000)
    file = tmp_path / "x.memsize"
    file.write_bytes(gzip.compress(b" " * 1001))
    assert "is not a saved run" in refused(file)


@pytest.mark.parametrize("begins", [b"", b'{"schema":"memsize.run/1","kind":"report","memsize":"0.1.0","answer":"'])
def test_what_is_packed_a_thousand_times_is_read_no_further(begins: bytes, tmp_path: Path) -> None:
    """16 MiB and 32 times its size are read, in some copies: 200 MiB would be 200,000 bytes of a file."""
    file = tmp_path / "x.memsize"
    with gzip.open(file, "wb") as packed:
        packed.write(begins)
        for _ in range(200):
            packed.write(bytes(2**20))
    assert file.stat().st_size < 2**18
    tracemalloc.start()
    try:
        assert "is not a saved run" in refused(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * (16 + 32 / 4 + 1) * 2**20


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_never_gives_another_answer(place: int, byte: int) -> None:
    report = records.toy_report()
    folder = Path(tempfile.mkdtemp())
    file = folder / "x.memsize"
    report.save(file)
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= byte
    file.write_bytes(content)
    try:
        found = read_run(file, record_of)
    except InputError as error:
        found = None
        message = str(error)
    shutil.rmtree(folder)
    # gzip's check sum covers the content, but not all of its own header.
    assert found == report or (found is None and "\n" not in message)


# -- what is written ---------------------------------------------------------------------------------------------------


def test_an_existing_run_is_replaced_on_demand_only(tmp_path: Path) -> None:
    file = tmp_path / "x.memsize"
    records.toy_report().save(file)
    os.chmod(file, 0o640)
    with pytest.raises(OutputError, match="exists already: --force overwrites it"):
        records.structures_report().save(file)
    assert read_run(file, record_of) == records.toy_report()
    records.structures_report().save(file, overwrite=True)
    assert read_run(file, record_of) == records.structures_report()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["x.memsize"]


@pytest.mark.parametrize(
    "content",
    [NOT_OURS["text"], NOT_OURS["other gzip"], DAMAGED["cut"], NEWER["a newer schema"]],
    ids=["text", "other gzip", "damaged", "newer"],
)
def test_what_is_no_run_of_ours_is_never_overwritten(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "precious.memsize"
    file.write_bytes(content)
    with pytest.raises(OutputError, match="; it is not overwritten"):
        records.toy_report().save(file, overwrite=True)
    assert file.read_bytes() == content


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    for path, says in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.memsize", "there is no folder")):
        with pytest.raises(OutputError, match=says):
            records.toy_report().save(path)


def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.memsize"
    records.toy_report().save(file)
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        records.structures_report().save(file, overwrite=True)
    assert file.read_bytes() == before and os.listdir(tmp_path) == ["x.memsize"]


def test_an_older_record_takes_the_defaults_of_new_fields(tmp_path: Path) -> None:
    file = tmp_path / "x.memsize"
    write_run(
        file, Report("m", Trace("m", "fp32", True, 1, "2.13.0", (InputTensor("0", TensorSpec("int8", ()), 1),), (), ()))
    )
    data = read_data(file)
    for name in ("notes", "failure", "baseline", "gpu", "optimizer", "findings"):
        del data["answer"][name]
    file.write_bytes(packed(data))
    assert read_run(file, record_of).gpu == ""
