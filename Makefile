# `make demo` and `make test` each do their job on a fresh machine: whatever is missing is installed first.
# The environment is made again only when pyproject.toml or this file changes.

PYTHON ?= python3
VENV ?= .venv
# The versions that the golden figures were recorded with; users may have any torch that pyproject.toml allows.
PINS := torch==2.14.1 torchvision==0.29.1
# One of each minor version that memfit supports, the oldest first.
VERSIONS ?= 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
BIN := $(VENV)/bin
READY := $(VENV)/.installed
PAGES := $(VENV)/.installed-pages
C_FOLDERS := src tests

.PHONY: demo test test-slow test-fast test-versions test-oldest browser docs guide wheel lint format check clean

demo: $(READY)  # a GPT of GPT-2 small's size runs out of a small card's memory; a plan makes it fit
	$(BIN)/memfit dry-run --memory 6GiB examples/gpt.py
	$(BIN)/memfit compare --memory 6GiB examples/gpt.py
	$(BIN)/memfit plan --budget 5GiB -o $(VENV)/plan.json examples/gpt.py
	$(BIN)/memfit dry-run --memory 6GiB --plan $(VENV)/plan.json examples/gpt.py
	$(BIN)/memfit verify --plan $(VENV)/plan.json examples/gpt.py --context 64
	$(BIN)/memfit train --plan $(VENV)/plan.json examples/gpt.py --context 64 --steps 3

test: $(READY)
	$(BIN)/python -m compileall -q src  # or every command compiles memfit where PYTHONDONTWRITEBYTECODE is set
	$(BIN)/pytest -n 2 --dist loadgroup -m "not slow"

test-slow: $(READY)  # what is left out there: similar to other tests, or random, or large
	$(BIN)/python -m compileall -q src
	$(BIN)/pytest -n 2 --dist loadgroup -m slow

test-fast: $(READY)  # the tests that start no process
	$(BIN)/pytest -n 2 -m "not process"

test-versions: $(READY)  # over an hour, with the environments; make test-versions VERSIONS="2.10.0 2.15.0"
	$(BIN)/python benchmarks/torch_versions.py $(VERSIONS)

test-oldest: $(READY)  # what of that is likeliest to break first, with the oldest version
	$(BIN)/python benchmarks/torch_versions.py --training --equality --ranks --strategies $(firstword $(VERSIONS))

browser: $(PAGES)  # the report's pages in Chromium (on Debian: apt-get install chromium); make test skips them otherwise
	$(BIN)/pytest tests/report/test_html_browser.py tests/report/test_html_views.py

docs: $(READY)  # docs/cli.md, docs/settings.md and docs/torch-versions.md, from the code and recorded figures
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_settings.py
	$(BIN)/python docs/generate_versions.py

guide: $(PAGES)  # all pages and the API reference as one site: build/guide/docs/guide/index.html
	$(BIN)/sphinx-build -q -W --keep-going -c docs -b html . build/guide

wheel:  # built, installed into an environment of its own, and tried
	rm -rf dist build/wheel
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	build/wheel/bin/python -m pip install --quiet --no-compile $(PINS) dist/*.whl
	cd build/wheel && bin/memfit doctor && bin/memfit dry-run --fail $(CURDIR)/examples/linear1024.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find $(C_FOLDERS) -name '*.[ch]' -exec $(BIN)/clang-format --dry-run -Werror {} +
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find $(C_FOLDERS) -name '*.[ch]' -exec $(BIN)/clang-format -i {} +

check: lint test

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "memfit needs Python 3.11 or newer; $(PYTHON) is older or missing. Try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) cannot make environments. Install its venv module (on Debian: python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PINS) -e '.[dev,examples]'
	@touch $@

$(PAGES): $(READY)  # what builds the guide, and what opens pages in a browser
	$(BIN)/python -m pip install --quiet -e '.[docs,browser]'
	@touch $@
