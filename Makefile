PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The oldest transformers that is supported, beside the newest in requirements.txt.
OLDEST := transformers==5.17.0

# How long `make soak` runs, and where.
MINUTES ?= 10
DEVICE ?= cpu

.PHONY: demo test lint unit oldest slow soak bench docs map sanitize clean

demo: $(VENV)/.installed
	$(BIN)/dsv4 demo

test: lint unit oldest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict dsv4

unit: $(VENV)/.installed
	$(BIN)/pytest -n 2

oldest: $(VENV)/.oldest
	PYTHONPATH=$(VENV)/oldest $(BIN)/pytest -n 2 tests/model tests/integrations tests/test_config.py

slow: $(VENV)/.installed
	$(BIN)/pytest -n 2 -m slow

soak: $(VENV)/.installed
	$(BIN)/python -m tests.cache.soak --minutes $(MINUTES) --device $(DEVICE)

bench: $(VENV)/.installed
	$(BIN)/dsv4 bench plan

docs: $(VENV)-docs/.installed
	$(VENV)-docs/bin/python scripts/docs_pages.py
	$(VENV)-docs/bin/zensical build --strict --clean

map:
	$(PYTHON) scripts/module_map.py

sanitize:
	scripts/sanitize.sh

$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.oldest: $(VENV)/.installed
	rm -rf $(VENV)/oldest
	$(BIN)/pip install --quiet --disable-pip-version-check --target $(VENV)/oldest $(OLDEST)
	touch $@

$(VENV)-docs/.installed: requirements-docs.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-docs build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
