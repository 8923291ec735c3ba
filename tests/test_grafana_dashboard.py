"""docs/grafana-dashboard.json shows metrics that exist, in the form that Grafana imports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ds4_owner import metrics as owner_metrics
from ds4_owner.answers import OwnerFacts
from helpers.fake_server import fake_server

PAGE = Path(__file__).resolve().parents[1] / "docs" / "grafana-dashboard.json"
TEXT = PAGE.read_text()
DASHBOARD: dict[str, Any] = json.loads(TEXT)
METRIC = re.compile(r"\bds4_\w+")
LABEL = re.compile(r"\bby \(([^)]*)\)|(\w+)=~?\"|\{\{(\w+)\}\}")
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def texts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
    elif isinstance(value, str):
        yield value


def owner_text() -> str:
    facts = OwnerFacts(backend="memfd", owner_id="0" * 16, state="ready")
    return owner_metrics.render(
        owner_metrics.Observed(
            facts=facts,
            leases=[],
            connections=0,
            line_requests=0,
            native_requests=0,
            identity_refusals=0,
            uptime_seconds=1.0,
        )
    )


@cache
def exported() -> dict[str, set[str]]:
    """Sample names of worker and owner, with their labels."""
    found: dict[str, set[str]] = {}
    with fake_server() as server:
        body = {"prompt": "ab", "max_tokens": 3, "ignore_eos": True}
        assert server.request("POST", "/v1/completions", body)[0] == 200
        worker = server.request("GET", "/metrics")[1]
    for text in (worker, owner_text()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_of_the_dashboard_is_exported() -> None:
    named = set(METRIC.findall(TEXT.replace("ds4-", "")))
    assert len(named) > 20
    assert named - set(exported()) == set()


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_in_which_unit_and_from_the_chosen_source(
    panel: dict[str, Any],
) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        known = set().union(*(exported()[name] for name in METRIC.findall(target["expr"])))
        for grouped, matched, shown in LABEL.findall(target["expr"] + target["legendFormat"]):
            labels = set(re.findall(r"\w+", grouped or matched or shown))
            assert labels <= known | SCRAPED, target["expr"]
        # Counters are shown as rates, never as they stand.
        for name in METRIC.findall(target["expr"]):
            if name.endswith(("_total", "_bucket")):
                assert re.search(rf"(?:rate|increase)\({name}\b", target["expr"]), target["expr"]


def test_panels_have_different_ids_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_variables_are_defined_and_no_place_is_written_down() -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    used = {a or b for text in texts(DASHBOARD) for a, b in VARIABLE.findall(text)}
    assert {name for name in used if not name.startswith("__")} == set(variables)
    assert not re.search(r"https?://|localhost|\d+\.\d+\.\d+\.\d+|:\d{4}\b", TEXT)
    assert "id" not in DASHBOARD, "an id belongs to one Grafana"
