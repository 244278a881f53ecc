PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Requirements are whole locks: nothing but what they list is installed.
INSTALL := pip install --quiet --disable-pip-version-check --no-deps --require-hashes
PYTEST := $(BIN)/pytest -n 2 --dist worksteal
# Tests that run a model, in whose products CPUs differ, and another CPU's products.
MODEL_TESTS := tests/test_docs.py tests/test_readme.py tests/tools/test_cli.py tests/tools/inspector \
	tests/model tests/integrations tests/test_engine.py tests/serve/test_process.py
OTHER_CPU := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE \
	TEST_THREADS=2 OMP_WAIT_POLICY=passive

# What some tests compare with or run on, in folders of their own.
OPTIONAL := PYTHONPATH=$(VENV)/mlx:$(VENV)/engines

# Which larger sets `make slow` runs.
SLOW ?= slow

# Tools that `make sanitize` runs, one after the other.
SANITIZERS ?= memcheck racecheck synccheck

# How long `make soak` runs, and where.
MINUTES ?= 10
DEVICE ?= cpu

.PHONY: demo test lint unit oldest slow othercpu gpu soak bench docs map sanitize lock clean

demo: $(VENV)/.installed
	$(BIN)/dsv4 demo

test: lint unit oldest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict dsv4

unit: $(VENV)/.mlx $(VENV)/.engines
	$(OPTIONAL) $(PYTEST) --durations=10

oldest: $(VENV)/.oldest
	PYTHONPATH=$(VENV)/oldest $(PYTEST) tests/model tests/integrations tests/test_config.py

slow: $(VENV)/.engines
	$(OPTIONAL) $(PYTEST) -m "$(SLOW)" --durations=10

othercpu: $(VENV)/.mlx
	$(OPTIONAL) $(OTHER_CPU) $(PYTEST) $(MODEL_TESTS)

# Arguments of a part go into GPU_TESTS, as in make gpu GPU_TESTS="--minutes 4".
gpu:
	$(PYTHON) scripts/gpu_tests.py $(GPU_TESTS)

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
	for tool in $(SANITIZERS); do SANITIZER_TOOL=$$tool scripts/sanitize.sh || exit 1; done

$(VENV)/.installed: requirements.txt requirements-cuda.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) -r requirements.txt
	$(BIN)/pip show torch | grep -q '^Version:.*+cpu' || $(BIN)/$(INSTALL) -r requirements-cuda.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.oldest: $(VENV)/.installed requirements-oldest.txt
	rm -rf $(VENV)/oldest
	$(BIN)/$(INSTALL) --target $(VENV)/oldest -r requirements-oldest.txt
	touch $@

# Without wheels for this machine its tests are skipped, and the next run tries again.
$(VENV)/.mlx $(VENV)/.engines: $(VENV)/.%: requirements-%.txt $(VENV)/.installed
	rm -rf $(VENV)/$*
	$(BIN)/$(INSTALL) --target $(VENV)/$* -r $< && touch $@ \
		|| echo "$< could not be installed: tests that need it are skipped"

$(VENV)-docs/.installed: requirements-docs.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/$(INSTALL) -r requirements-docs.txt
	touch $@

# WHEELS are other builds of pinned versions, whose hashes are added.
lock: $(VENV)-lock/bin/uv
	$(VENV)-lock/bin/python scripts/lock.py $(WHEELS:%=--wheel %) requirements*.txt

$(VENV)-lock/bin/uv:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet --disable-pip-version-check uv

clean:
	rm -rf $(VENV) $(VENV)-docs $(VENV)-lock build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
