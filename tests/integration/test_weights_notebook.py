"""The example notebook is a valid one, and every cell runs against a real owner."""

from __future__ import annotations

import ast
import gc
import tempfile
from pathlib import Path

from ds4_common import client
from helpers import notebook, stack
from helpers.tiny_gguf import write_llama


def test_the_notebook_has_the_form_of_nbformat_4_5() -> None:
    document = notebook.read()
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert set(document) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    ids = [cell["id"] for cell in document["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in document["cells"]:
        expected = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            expected |= {"execution_count", "outputs"}
            ast.parse("".join(cell["source"]))
            for output in cell["outputs"]:
                assert (output["output_type"], output["name"]) == ("stream", "stdout")
        assert set(cell) == expected
        assert all(isinstance(line, str) for line in cell["source"])


def test_every_cell_runs_and_leaves_no_lease() -> None:
    with tempfile.TemporaryDirectory(prefix="ds4-n-") as name:
        folder = Path(name)
        with stack.owner(write_llama(folder / "tiny.gguf"), folder):
            printed = notebook.run(notebook.read(), str(folder / "w"))
            gc.collect()
            with client.connect(str(folder / "w"), "status") as connection:
                assert connection.status().leases == []
    shown = "".join(printed)
    assert "21 tensors of model base" in shown
    assert "same memory: True" in shown
    assert "read-only" in shown
    assert "Q8_0 in layout X8" in shown
