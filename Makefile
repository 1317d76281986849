# Two commands need nothing but Python: `make smoke` and `make test`.
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
VENV ?= .venv
PY := $(VENV)/bin/python

.PHONY: setup setup-evalplus setup-system smoke test test-slow check clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet -e ".[dev]"
	@printf '%s\n' "$(TORCH)" > $@

setup: ## make the virtual environment; TORCH=torch==2.14.1 for H100 nodes
	@if [ -f $(VENV)/.installed ] && [ "$$(cat $(VENV)/.installed)" != "$(TORCH)" ]; then rm -f $(VENV)/.installed; fi
	@$(MAKE) --no-print-directory $(VENV)/.installed

setup-evalplus: setup ## evalplus in an environment of its own; also made on first use
	$(PY) -c "from eval.evalplus_env import setup; setup()"

setup-system: ## Debian packages of the tests that need them (a real Slurm, the sandbox); they are skipped without
	@if ! command -v slurmctld slurmd sbatch munged bwrap >/dev/null; then \
		apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge bubblewrap; fi

smoke: setup ## the whole pipeline, small, on real text
	$(PY) -m launch smoke

test: setup ## all tests but the slow ones, on CPU
	$(PY) -m pytest -m "not slow"

test-slow: setup
	$(PY) -m pytest -m slow

check: setup ## format, lint and types; what pre-commit runs
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright

clean:
	rm -rf $(VENV) .venv-evalplus runs/smoke data/smoke
