"""The page's files over HTTP: which there are, their headers, and nothing beyond them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ds4_worker.http import page
from helpers.fake_server import fake_server

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = re.compile(r"""(?:from|import)\s+["']([^"']+)["']""")
ELSEWHERE = re.compile(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}""", re.IGNORECASE)


def source(name: str) -> str:
    return (page.FOLDER / name).read_text()


def test_the_table_names_every_file_of_the_folder_and_no_other() -> None:
    assert sorted(page.FILES.values()) == sorted(p.name for p in page.FOLDER.iterdir())


def test_the_files_travel_in_the_wheel() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setup["package-data"]["ds4_worker"]
    package = page.FOLDER.parent
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path for path in shipped if path.parent == page.FOLDER} == set(page.FOLDER.iterdir())


def test_the_page_is_served_with_its_type_a_strict_policy_and_without_a_key() -> None:
    with fake_server(api_key="k") as server:
        for path, name in page.FILES.items():
            status, headers, body = server.exchange("GET", path)
            assert (status, body) == (200, source(name))
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'self'; ")
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
            assert headers["content-type"].startswith(
                kind.get(name.split(".")[-1], "image/svg+xml")
            )


def test_a_client_that_has_the_file_is_told_so() -> None:
    with fake_server() as server:
        _, headers, _ = server.exchange("GET", "/")
        tag = headers["etag"]
        for known in (tag, f'W/{tag}, "other"', "*"):
            status, again, body = server.exchange("GET", "/", **{"If-None-Match": known})
            assert (status, body, again["etag"]) == (304, "", tag)
            assert "content-length" not in again
        assert server.exchange("GET", "/", **{"If-None-Match": '"other"'})[0] == 200


def test_head_of_the_page_tells_its_size() -> None:
    with fake_server() as server:
        status, headers, body = server.exchange("HEAD", "/")
        assert (status, body) == (200, "")
        assert int(headers["content-length"]) == len(source("index.html").encode())
        assert server.exchange("POST", "/")[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        *("/page/", "/page/../cli.py", "/page/%2e%2e/cli.py", "/page//etc/passwd", "/page/app"),
        *("/page/page.py", "/index.html", "/page/index.html", "/page/app.js/", "/page/APP.JS"),
    ],
)
def test_paths_beside_the_table_are_404(path: str) -> None:
    with fake_server() as server:
        assert server.exchange("GET", path)[0] == 404


def test_nothing_of_the_page_comes_from_elsewhere_and_nothing_is_inline() -> None:
    markup = source("index.html")
    assert ELSEWHERE.findall(markup) == []
    assert re.findall(r"\s(?:on\w+|style)=", markup) == []
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style", markup) == []
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', markup)) <= set(page.FILES)
    styles = source("style.css")
    assert re.findall(r"@import|url\(", styles) == []
    for path, name in page.FILES.items():
        if name.endswith(".js"):
            assert all(
                f"/page/{m.removeprefix('./')}" in page.FILES for m in SCRIPT.findall(source(name))
            ), path


def test_the_scripts_never_make_markup_of_text() -> None:
    dangerous = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    )
    assert [
        n for n in page.FILES.values() if n.endswith(".js") and dangerous.search(source(n))
    ] == []


def test_every_element_the_scripts_look_for_is_in_the_page() -> None:
    markup = source("index.html")
    ids = re.findall(r'\bid="([^"]+)"', markup)
    assert len(ids) == len(set(ids))
    for name in page.FILES.values():
        if name.endswith(".js"):
            assert set(re.findall(r'byId\("([^"]+)"\)', source(name))) <= set(ids), name
    for reference in re.findall(
        r'(?:aria-controls|aria-labelledby|aria-describedby|for)="([^"]+)"', markup
    ):
        assert reference in ids


def test_a_worker_that_nobody_looks_at_imports_no_page() -> None:
    code = (
        "import sys; import ds4_worker.cli, ds4_worker.serve;"
        "print(sorted({'ds4_worker.http.page', 'ds4_worker.http.stats'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
