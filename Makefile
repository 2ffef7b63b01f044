# Two commands do everything: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test bench lint parity-live gpu clean

demo: $(STAMP)
	$(BIN)/prefixlab run worked_example
	$(BIN)/prefixlab run step_curve --jobs 2

test: $(STAMP) lint
	$(BIN)/pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python tools/bench.py

# Needs vLLM's and SGLang's own code, each in an environment of its own: docs/parity.md says how.
parity-live: $(STAMP)
	$(BIN)/python tools/parity_live.py --count 200

# Everything that needs a GPU, in one go; DRY=1 runs it small on a CPU: docs/calibration.md.
gpu:
	tools/gpu.sh

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) results
