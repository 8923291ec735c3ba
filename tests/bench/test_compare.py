"""The comparison asks both engines the same of one file, and tells a peer that gives no figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from ds4_common.errors import Ds4Error
from ds4_common.gguf import GgmlType
from ds4_worker.bench import compare
from ds4_worker.bench.report import Row
from ds4_worker.bench.synthetic import SHAPES
from helpers.models import smollm2_path

PEER = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
*-npl*) echo 'noise'; echo '{{"pl": 4, "speed_tg": 8.0}}'; echo '{{"pl": 8, "speed_tg": 16.0}}' ;;
*"-d 96"*) echo '{{"n_prompt": 0, "avg_ts": 0.5}}' ;;
*) echo '{{"n_prompt": 512, "avg_ts": 2.0}}'; echo '{{"n_prompt": 600, "avg_ts": 3.0}}'
   echo '{{"n_prompt": 0, "avg_ts": 1.0}}' ;;
esac
"""


def peer(folder: Path, text: str = PEER) -> str:
    path = folder / "peer"
    path.write_text(text.format(log=folder / "asked"))
    path.chmod(0o755)
    return str(path)


def test_both_are_measured_in_turn_and_stand_in_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(SHAPES["dense-1b"], width=256, layers=1, heads=4, kv_heads=2, inner=512)
    monkeypatch.setattr(compare, "DENSE", small)
    program, rows = peer(tmp_path), list[Row]()
    compare.measure(
        ["Q4_0"],
        smollm2_path(),
        compare.Peer(program, program),
        1,
        2,
        [512, 600],
        96,
        2,
        lambda: 1e9,
        rows.extend,
    )
    found = {row.name: row for row in rows}
    expected = {
        "prompt 512": 2.0,
        "prompt 600": 3.0,
        "decode": 1.0,
        "decode at depth 96": 0.5,
        "cost of 1000 positions before a token": 1e9 / 96,  # a second more after 96 positions
        "4 streams": 8.0,
        "8 streams": 16.0,
    }
    assert {name: found[f"Q4_0: {name}"].reference for name in expected} == expected
    share = found["Q4_0: decode, share of read bandwidth"]
    assert share.reference is not None
    assert share.reference > 0
    assert all(row.runs == 2 for row in rows)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 6
    assert all("-t 1" in line and "Q4_0.gguf" in line for line in asked)


def test_without_a_peer_our_figures_stand_alone() -> None:
    assert (
        compare.Peer().rates(Path("x"), 1, 1, [512])
        == compare.Peer().deep(Path("x"), 1, 1, 96)
        == compare.Peer().together(Path("x"), 1, 1, (4,))
        == {}
    )


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 3\n", "#!/bin/sh\necho no figures\n"])
def test_a_peer_without_figures_is_an_error_with_its_command(tmp_path: Path, text: str) -> None:
    with pytest.raises(Ds4Error, match=r"peer: .*-p 512 -n 2.* 0 figures.*run it by hand"):
        compare.Peer(peer(tmp_path, text)).rates(tmp_path / "m.gguf", 2, 2, [512])


def test_an_unknown_type_is_refused_before_anything_is_made() -> None:
    with pytest.raises(Ds4Error, match="got 'Q9'"):
        compare.measure(
            ["Q8_0", "Q9"],
            Path("none"),
            compare.Peer(),
            1,
            1,
            [512],
            0,
            1,
            lambda: 1.0,
            list[Row]().extend,
        )


def test_a_slope_is_what_positions_add_to_a_token() -> None:
    samples = compare._Samples()
    samples.add(samples.ours, {"decode": 100.0, "decode at depth 2016": 50.0})  # 10 ms, 20 ms
    row = compare._slope_row("x", samples, 2016)
    assert row.median == pytest.approx(5000)
    assert (row.reference, row.goal) == (None, "")


def test_a_depth_within_the_short_context_is_refused() -> None:
    with pytest.raises(Ds4Error, match="--depth: got 16, expected 0 or more than 16"):
        compare.measure(
            ["Q8_0"],
            Path("none"),
            compare.Peer(),
            1,
            1,
            [512],
            16,
            1,
            lambda: 1.0,
            list[Row]().extend,
        )


def test_the_mixed_model_keeps_a_minority_of_its_weights_in_the_larger_type() -> None:
    shape, types = compare._model("Q4_K_M")
    kinds = [types.of(name, dims) for name, dims in shape.tensors(32000) if len(dims) > 1]
    assert set(kinds) == {GgmlType.Q4_K, GgmlType.Q6_K}
    assert kinds.count(GgmlType.Q6_K) == 1 + SHAPES["dense-1b"].layers
