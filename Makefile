# make demo | test | check | bench    VENV=… PYTHON=… PIN="…" give a separate environment
VENV ?= .venv
PYTHON ?= python3
# Versions to hold down, for the oldest set: PIN="Django==5.2.* redis==5.2.* asgiref==3.9.*"
PIN ?=
ARGS ?=

BIN = $(VENV)/bin
RUN = $(BIN)/python -X dev

.PHONY: demo test check bench clean

demo: $(VENV)/.demo
	$(BIN)/python example_project/manage.py demo $(ARGS)

test: $(VENV)/.dev
	$(RUN) -m pytest -n auto $(ARGS)

# Reads the settings, and asks no server.
check: export DATABASE_URL = sqlite://:memory:
check: export REDIS_URL = redis://
check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python example_project/manage.py makemigrations --check --dry-run

# Ratios of one run: the machine may be busy, and other machines are others.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# pip reads dependency groups since 25.1. A venv is made anew unless its interpreter runs.
$(VENV)/.pip:
	$(BIN)/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	touch $@

$(VENV)/.demo: $(VENV)/.pip pyproject.toml
	$(BIN)/python -m pip install --quiet --editable . --group demo $(PIN)
	touch $@

$(VENV)/.bench: $(VENV)/.pip pyproject.toml
	$(BIN)/python -m pip install --quiet --editable . --group bench $(PIN)
	touch $@

$(VENV)/.dev: $(VENV)/.pip pyproject.toml
	$(BIN)/python -m pip install --quiet --editable . --group dev $(PIN)
	touch $@
