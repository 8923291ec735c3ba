# Needs Python 3.11+, make and a C compiler. Everything else is installed into .venv by `make setup`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
STAMP := $(VENV)/.installed
GPU_STAMP := $(VENV)/.installed-gpu
# A development checkout must write byte code: start-up without it costs half a second per worker.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test gpu-test lint format bench setup model native proto clean

run: setup model
	$(BIN)/python tests/demo.py

# Both cores at once: tests/conftest.py says which tests run beside each other.
test: setup model $(GPU_STAMP)
	$(BIN)/python -m pytest $(if $(ARGS),$(ARGS),-n 2 --dist loadgroup)

# The same tests on this machine's CUDA device instead of the stand-in driver and the fibers: the
# driver's contract, the executor and its end to end, and the numerics of every kernel.
gpu-test: setup model $(GPU_STAMP)
	DS4_TEST_GPU=1 $(BIN)/python -m pytest tests/gpu $(wildcard tests/worker/test_cuda_*.py) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup model
	$(BIN)/ds4-bench all $(ARGS)

setup: $(STAMP) native

# setuptools' import hook for several roots costs 20 ms per process; three plain paths do not.
define install
@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(1)]'
@printf '%s\n' '$(CURDIR)/owner' '$(CURDIR)/worker' '$(CURDIR)/common' \
    > "$$(echo $(VENV)/lib/python3.*/site-packages/__editable__.ds4-*.pth)"
@touch $@
endef

$(STAMP): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {sys.version}")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'setting up $(VENV): dependencies and the native library, a minute or two, once'
	$(call install,dev)

# The CUDA bindings, compiler and headers (120 MB) that tests of the GPU path need on any machine.
$(GPU_STAMP): $(STAMP)
	@echo 'setting up $(VENV): CUDA bindings, compiler and headers for the tests, once'
	$(call install,dev$(comma)gputest)

# Incremental: compiles only what changed since the last build.
native: $(STAMP)
	@$(BIN)/python common/ds4_common/native/build.py >/dev/null

# The real small model the demo and the tests use, checked by sha256, kept outside the tree.
model: $(STAMP)
	@$(BIN)/python tests/helpers/fetch_model.py

proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -Icommon --python_out=common --pyi_out=common \
	    common/ds4_common/contract/prepared_model.proto

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f common/ds4_common/native/*.so
