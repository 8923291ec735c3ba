"""Typed getters: the right type or a GgufError that names the key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4_common.errors import GgufError
from ds4_common.gguf import ArrayInfo, LogicalModel, Metadata, ValueType
from helpers.tiny_gguf import gguf_bytes

ENTRIES: list[tuple[str, int, object]] = [
    ("int", ValueType.UINT16, 9),
    ("float", ValueType.FLOAT32, 0.5),
    ("bool", ValueType.BOOL, 1),
    ("text", ValueType.STRING, "h\u00e9"),
    ("latin", ValueType.STRING, b"h\xe9"),
    ("strings", ValueType.ARRAY, (ValueType.STRING, ["a", b"\xff", ""])),
    ("flags", ValueType.ARRAY, (ValueType.BOOL, [1, 0])),
    ("floats", ValueType.ARRAY, (ValueType.FLOAT64, [1.5])),
    ("nothing", ValueType.ARRAY, (ValueType.STRING, [])),
]
GETTERS = {
    "get_int": {"int"},
    "get_float": {"float"},
    "get_bool": {"bool"},
    "get_str": {"text"},
    "get_strings": {"strings", "nothing"},
    "get_ints": {"flags"},
    "get_floats": {"floats"},
}


@pytest.fixture
def meta(tmp_path: Path) -> Iterator[Metadata]:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(ENTRIES))
    with LogicalModel.open(path) as model:
        yield model.metadata


def test_mapping_has_scalars_and_lazy_arrays(meta: Metadata) -> None:
    assert list(meta) == [key for key, _, _ in ENTRIES]
    assert meta["int"] == 9
    assert meta["text"] == "h\u00e9"
    assert meta["latin"] == "h\\xe9"
    assert isinstance(meta["strings"], ArrayInfo)
    assert meta.type_of("int") is ValueType.UINT16
    assert "other" not in meta


def test_getters_return_their_types(meta: Metadata) -> None:
    assert meta.get_int("int") == 9
    assert meta.get_float("float") == 0.5
    assert meta.get_bool("bool") is True
    assert meta.get_str("text") == "h\u00e9"
    assert meta.get_strings("strings") == [b"a", b"\xff", b""]
    assert meta.get_strings("nothing") == []
    assert meta.get_ints("flags").tolist() == [1, 0]
    assert meta.get_floats("floats").tolist() == [1.5]


@pytest.mark.parametrize("getter", GETTERS)
def test_getters_refuse_every_other_type_and_name_the_key(meta: Metadata, getter: str) -> None:
    for key, _, _ in ENTRIES:
        if key not in GETTERS[getter]:
            with pytest.raises(GgufError, match=repr(key)):
                getattr(meta, getter)(key)


@pytest.mark.parametrize("getter", GETTERS)
def test_missing_key_is_an_error_unless_there_is_a_default(meta: Metadata, getter: str) -> None:
    with pytest.raises(GgufError, match=r"'no\.key'.*no such key"):
        getattr(meta, getter)("no.key")
    assert getattr(meta, getter)("no.key", None) is None
    assert getattr(meta, getter)("no.key", 5) == 5


def test_default_does_not_excuse_a_wrong_type(meta: Metadata) -> None:
    with pytest.raises(GgufError, match="'int'"):
        meta.get_str("int", None)


def test_boolean_array_with_another_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([("flags", ValueType.ARRAY, (ValueType.BOOL, [1, 2]))]))
    with LogicalModel.open(path) as model, pytest.raises(GgufError, match="'flags'"):
        model.metadata.get_ints("flags")
