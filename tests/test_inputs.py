"""Input specifications: what is read, what is refused and how, and that reading inverts writing."""

from __future__ import annotations

import keyword
import string

import pytest
from hypothesis import given, strategies as st

from memsize import InputSpec
from memsize.errors import InputError
from tests.models import DTYPES, format_shape, parse_input, parse_inputs

names = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=12).filter(
    lambda name: name.isidentifier() and not keyword.iskeyword(name)
)
shapes = st.lists(st.integers(1, 4096), max_size=5).map(tuple)
specs = st.builds(InputSpec, st.none() | names, shapes, st.none() | st.sampled_from(DTYPES))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("3,64,64", InputSpec(None, (3, 64, 64))),
        ("3x64x64", InputSpec(None, (3, 64, 64))),
        (" 3, 64 ,64 ", InputSpec(None, (3, 64, 64))),
        ("512", InputSpec(None, (512,))),
        ("3,224,224:float16", InputSpec(None, (3, 224, 224), "float16")),
        ("input_ids=512:int64", InputSpec("input_ids", (512,), "int64")),
        ("x=3x8:torch.bfloat16", InputSpec("x", (3, 8), "bfloat16")),
        ("512:long", InputSpec(None, (512,), "int64")),
        ("3:half", InputSpec(None, (3,), "float16")),
        ("label=:int64", InputSpec("label", (), "int64")),
        ("label=", InputSpec("label", ())),
        (":int64", InputSpec(None, (), "int64")),
        ("()", InputSpec(None, ())),
        ("[3,64,64]", InputSpec(None, (3, 64, 64))),
        ("x=(512, ):int64", InputSpec("x", (512,), "int64")),
        ("int64[128]", InputSpec(None, (128,), "int64")),
        ("ids=int64[128]", InputSpec("ids", (128,), "int64")),
    ],
)
def test_reads_an_input(text: str, spec: InputSpec) -> None:
    assert parse_input(text) == spec


@given(specs)
def test_parsing_inverts_formatting(spec: InputSpec) -> None:
    assert parse_input(str(spec)) == spec


@given(st.text(max_size=20))
def test_any_text_is_an_input_or_an_input_error(text: str) -> None:
    try:
        spec = parse_input(text)
    except InputError:
        return
    assert parse_input(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "cannot read ''"),
        ("  ", "cannot read"),
        ("3,,64", "'' is not a size"),
        ("3,64,", "'' is not a size"),
        ("three,64", "'three' is not a size"),
        ("nets/make.py:inputs", "goes with --inputs nets/make.py:inputs"),
        ("3,0,64", "a size of 0"),
        ("-3,64", "'-3' is not a size"),
        ("inf,64", "'inf' is not a size"),
        ("nan", "'nan' is not a size"),
        ("1e3", "'1e3' is not a size"),
        ("3.5", "'3.5' is not a size"),
        ("٣,64", "is not a size"),  # Arabic digits: int() would take them
        ("9" * 5000, "is not a size"),
        ("9999999999,9999999999", "more elements than a tensor can hold"),
        ("3,64:flaot16", "did you mean float16"),
        ("3,64:int46", "did you mean int64"),
        ("3,64:", "a dtype is missing"),
        ("=3,64", "'' cannot be the name"),
        ("my input=3", "'my input' cannot be the name"),
        ("class=3", "'class' cannot be the name"),
        ("a=b=3", "'a=b' cannot be the name"),
    ],
)
def test_says_what_is_wrong(text: str, part: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_input(text)
    assert part in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, 2**63])
def test_a_size_is_checked_however_it_is_given(size: int) -> None:
    with pytest.raises(InputError):
        InputSpec(None, (3, size))


def test_the_same_name_twice_is_refused() -> None:
    assert parse_inputs(["3,4", "3,4", "mask=4:bool"])[2] == InputSpec("mask", (4,), "bool")
    with pytest.raises(InputError, match="'x' is given twice"):
        parse_inputs(["x=3", "y=3", "x=4"])


def test_shapes_as_text() -> None:
    assert format_shape((3, 64, 64)) == "3,64,64"
    assert format_shape(()) == "()"


def test_every_dtype_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    assert all(str(getattr(torch, name)) == f"torch.{name}" for name in DTYPES)
    aliases = ("float", "half", "double", "long", "int", "short", "chalf", "cfloat", "cdouble")
    assert [f"torch.{parse_input(f'3:{name}').dtype}" for name in aliases] == [str(getattr(torch, n)) for n in aliases]
