"""A worker on a machine without NVRTC: `python -m helpers.no_compiler <worker flags>`."""

from __future__ import annotations

import sys

from ds4_worker import cli

if __name__ == "__main__":
    sys.modules["cuda.bindings.nvrtc"] = None  # type: ignore[assignment]
    sys.exit(cli.main(sys.argv[1:]))
