"""An image read back is the image that was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common.contract import image as im
from ds4_common.contract.image_read import read_image
from ds4_common.contract.lower import lower_image
from ds4_common.errors import ContractError
from golden import tiny
from helpers.prepared import prepare_file
from helpers.tiny_gguf import write_llama


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = write_llama(tmp_path_factory.mktemp("image") / "m.gguf")
    return im.write_image(lower_image(prepare_file(path).bundle))


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_family_comes_back_byte_for_byte(family: str, tmp_path: Path) -> None:
    for case in tiny.cases_of(family):
        image = lower_image(prepare_file(tiny.write_gguf(case, tmp_path / "m.gguf")).bundle)
        data = im.write_image(image)
        read = read_image(data)
        assert im.write_image(read) == data
        assert [len(s.ops) for s in read.sections] == [len(s.ops) for s in image.sections]
        assert [o.inputs for s in read.sections for o in s.ops] == [
            o.inputs for s in image.sections for o in s.ops
        ]


@given(data=st.data())
def test_a_cut_or_longer_image_is_refused(written: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(written) - 1))
    for wrong in (written[:cut], written + b"\0"):
        with pytest.raises(ContractError):
            read_image(wrong)


@given(at=st.integers(0, 1 << 20), byte=st.integers(0, 255))
def test_any_changed_byte_gives_an_image_or_one_error(written: bytes, at: int, byte: int) -> None:
    changed = bytearray(written)
    changed[at % len(changed)] = byte
    try:
        read_image(bytes(changed))
    except ContractError:
        return
