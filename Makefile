# make demo   sets up .venv and compares the modes on the embedded digits
# make test   sets up .venv and runs the tests, JOBS at a time (JOBS=0: in one process)
# make test-all   the same with those marked slow: kernels in an interpreter, random kills, sweeps
# make docs   sets up .venv and builds the documentation as a site, links checked, in site/
# make test-deploy   starts a federation on loopback, with TLS and keys, and tests it
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
# fixed_dp twice: at the documents' epsilon, and at the one that by exact accounting is about as much
# as certified spends.
MODES ?= fedavg,fixed_dp,fixed_dp:54,quap_fl,quap_fl_client,certified:worst_case,certified
# Small models train faster on one thread than on many.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all test-deploy check docs install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,flower,flower-sim]"
	touch $@

demo: install
	$(BIN)/fedquilt compare --config demo.toml --modes $(MODES) $(DEMO)

test: install
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "not deploy and not slow" $(TESTS)

test-all: install
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "not deploy" $(TESTS)

test-deploy: install
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder -m deploy $(TESTS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site results .pytest_cache .mypy_cache .ruff_cache
