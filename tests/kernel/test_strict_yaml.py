from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import example, given, settings
from hypothesis import strategies as st

from postbus.kernel import strict_yaml
from postbus.kernel.strict_yaml import BYTES_MAX, InvalidFile, parse_yaml, read_yaml


class Plain(yaml.SafeDumper):  # type: ignore[misc]
    """A writer that repeats what occurs twice instead of naming it."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the writer's own signature
        return True


@pytest.fixture(params=["CSafeLoader", "SafeLoader"], autouse=True, scope="module")
def _parser(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both parsers: a machine may lack the one in C."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_yaml, "LOADER", getattr(yaml, request.param))
        yield


def refused(text: str | bytes) -> InvalidFile:
    with pytest.raises(InvalidFile) as caught:
        parse_yaml(text if isinstance(text, bytes) else text.encode(), "a.yaml")
    return caught.value


def test_plain_values_are_read_with_their_lines() -> None:
    document = parse_yaml(
        b"# a comment\na: 1\nb:\n  - x\n  - {c: 1.5, d: 'no'}\ne: |\n  two\n  lines\nf: ~\ng: true\nh: -3.5e+2\n",
        "a.yaml",
    )
    assert document.value == {
        "a": 1,
        "b": ["x", {"c": 1.5, "d": "no"}],
        "e": "two\nlines\n",
        "f": None,
        "g": True,
        "h": -350.0,
    }
    assert [document.line(path) for path in [("a",), ("b", 0), ("b", 1, "d"), ("e",), ("nowhere", 1)]] == [
        2,
        4,
        5,
        6,
        2,
    ]


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("a: 1\nb: &x [1]\n", 2, "anchors are not allowed (&x)"),
        ("a: 1\nb: *x\n", 2, "aliases are not allowed (*x)"),
        ("a: !!python/object/apply:os.system ['true']\n", 1, "tags are not allowed"),
        ("a: !!str 1\n", 1, "tags are not allowed"),
        ("a: !mine 1\n", 1, "tags are not allowed"),
        ("a: 1\nb: 2\na: 3\n", 3, "the key 'a' is there twice"),
        ("a: 1\n<<: {b: 1}\n", 2, "'<<' is a merge key"),
        ("topic: no\n", 1, "'no' is a boolean in YAML"),
        ("a: 1\ntopic: On\n", 2, "'On' is a boolean"),
        ("a: 1:30\n", 1, "'1:30' is a number"),
        ("a: 010\n", 1, "'010' is a number"),
        ("a: 2026-01-31\n", 1, "'2026-01-31' is a date"),
        ("a: .inf\n", 1, "'.inf' is a number"),
        ("a: Null\n", 1, "'Null' is nothing"),
        ("1: a\n", 1, "a key is a text"),
        ("[a]: b\n", 1, "a key is a text"),
        ("---\na: 1\n---\nb: 1\n", 3, "more than one document"),
        ("a: [1\nb: 2\n", 2, "is no YAML"),
        ("a:\n\t- x\n", 2, "is no YAML"),
        ("a: b: c\n", 1, "is no YAML"),
        (b"a: 1\nb: \xff\n", 2, "is not UTF-8"),
        ("a: 1\nb: \x00\n", 2, "is no YAML"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_line(text: str | bytes, line: int, sentence: str) -> None:
    error = refused(text)
    assert (error.line, error.where) == (line, f"a.yaml:{line}")
    assert sentence in error.message


@pytest.mark.parametrize("deep", ["[" * 20_000, "{a: " * 15_000, "\n".join(" " * i + f"k{i}:" for i in range(300))])
def test_deep_nesting_is_refused(deep: str) -> None:
    assert "nested deeper than 32" in refused(deep[:BYTES_MAX]).message


def test_a_bomb_of_aliases_is_refused() -> None:
    lines = ["a0: &a0 [lol]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert refused("\n".join(lines)).line == 1


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_bytes(b"a: " + b"x" * BYTES_MAX)
    with pytest.raises(InvalidFile, match="larger than 64 KiB"):
        read_yaml(path)
    path.write_bytes(b"a: " + b"x" * (BYTES_MAX - 3))
    assert len(read_yaml(path).value["a"]) == BYTES_MAX - 3


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(-1e9, 1e9).map(lambda x: round(x, 3))
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)
@given(VALUES)
def test_what_another_writer_wrote_is_read_as_it_was_meant(value: object) -> None:
    text = yaml.dump(value, Dumper=Plain)
    assert parse_yaml(text.encode(), "a.yaml").value == value


@settings(deadline=None)
@given(st.text(alphabet="abn:-[]{}&*!#|>%@'\"\\ \n\t012.~,?", max_size=60) | st.text(max_size=60))
@example("? a\n? b\n")
@example("%YAML 1.2\n---\na: 1\n")
def test_whatever_the_text_it_is_read_or_refused(text: str) -> None:
    with suppress(InvalidFile):
        parse_yaml(text.encode("utf-8", "replace"), "a.yaml")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match=r"none\.yaml: cannot be read"):
        read_yaml(tmp_path / "none.yaml")
