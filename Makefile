# Everything a developer or CI runs. Nothing but Python 3.11, 3.12 or 3.13 has to be installed: `make help`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
NEWEST := .venv-newest
TPU := .venv-tpu
BIN := $(VENV)/bin
FIND_PYTHON := bash .ci/find-python
PYTHON ?= $(shell $(FIND_PYTHON) 3.11 3.12 3.13)
PYTHON_NEWEST ?= $(shell $(FIND_PYTHON) 3.13)
PYTEST_ARGS ?= -n 2
# What has to hold on the newest JAX: whatever looks inside a jaxpr, exactness, and a training step from end to end.
NEWEST_TESTS := tests/core/ops/test_contract.py tests/core/rules/test_exactness.py tests/flax/test_train_step.py \
  $(foreach name,calls traps,tests/core/compiler/test_$(name).py)
ONE_DEVICE_TESTS := tests/core/rules $(foreach name,models nan train_step,tests/flax/test_$(name).py)

REQUIREMENTS := pyproject.toml $(wildcard constraints/*.txt)
PIP := -m pip --disable-pip-version-check --quiet

# $(call pins,VENV): the constraints file for the Python of that environment.
pins = constraints/py$$($(1)/bin/python -c 'import sys; print("%d%d" % sys.version_info[:2])').txt

# $(call create,VENV,PYTHON): an empty environment.
define create
	@test -n "$(2)" || { echo "No Python 3.11 to 3.13 that can make virtual environments was found for $(1): install one, or set PYTHON=."; exit 1; }
	rm -rf $(1)
	$(2) -m venv $(1)
endef

# $(call install,VENV,PYTHON): an environment with the tested versions, where they are known for that Python.
define install
	$(call create,$(1),$(2))
	@pins=$(call pins,$(1)); \
	test -e $$pins || { echo "no $$pins: taking the newest versions that fit"; pins=/dev/null; }; \
	echo "$(1)/bin/python -m pip install -c $$pins -e .[test]"; \
	$(1)/bin/python $(PIP) install -c $$pins -e '.[test]'
	@touch $(1)/.installed
endef

# $(call lock,PYTHON): pin what a fresh environment of that Python resolves to.
define lock
	$(call create,.venv-lock,$(1))
	.venv-lock/bin/python $(PIP) install -e '.[test]'
	.venv-lock/bin/python $(PIP) check
	@pins=$(call pins,.venv-lock); \
	{ echo '# Written by `make lock`: all that `pip install .[test]` brings.'; \
	  .venv-lock/bin/python $(PIP) freeze --exclude-editable; } > $$pins; \
	! grep -vE '^(#|[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+$$)' $$pins
	rm -rf .venv-lock
endef

.PHONY: help
help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.installed: $(REQUIREMENTS)
	$(call install,$(VENV),$(PYTHON))

$(NEWEST)/.installed: $(REQUIREMENTS)
	$(call install,$(NEWEST),$(PYTHON_NEWEST))

# Only what these tests need: they are to be quick.
$(TPU)/.installed: $(REQUIREMENTS)
	$(call create,$(TPU),$(PYTHON))
	@pins=$(call pins,$(TPU)); test -e $$pins || pins=/dev/null; \
	echo "$(TPU)/bin/python -m pip install -c $$pins -e .[tpu] hypothesis pytest pytest-timeout pytest-xdist"; \
	$(TPU)/bin/python $(PIP) install -c $$pins -e '.[tpu]' hypothesis pytest pytest-timeout pytest-xdist
	@touch $(TPU)/.installed

.PHONY: install
install: $(VENV)/.installed ## Create .venv with the package and its test tools.

.PHONY: environments
environments: ## Create the environments of all tests side by side; those of the newest JAX and of the TPU if they can be.
	$(MAKE) --no-print-directory -j 3 install $(if $(PYTHON_NEWEST),$(NEWEST)/.installed) try-tpu

.PHONY: try-tpu
try-tpu:
	@$(MAKE) --no-print-directory $(TPU)/.installed || echo "libtpu could not be installed in $(TPU)."

.PHONY: train
train: install ## Train a network online on real digits: progress, a learning curve, a report and checkpoints in runs/.
	$(BIN)/python -m braintrace_flax.train --config configs/digits.py

.PHONY: test
test: install ## Run all tests and doctests (PYTEST_ARGS="-n 0 -k name" to choose).
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: test-newest
test-newest: ## Run tests of each layer on Python 3.13 and the newest supported JAX, if there is such a Python.
	@if test -n "$(PYTHON_NEWEST)"; then \
	  $(MAKE) --no-print-directory run-newest; \
	else \
	  echo "No working python3.13 found, on PATH or in pyenv: skipping the tests on the newest JAX."; \
	fi

.PHONY: run-newest
run-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pytest $(PYTEST_ARGS) $(NEWEST_TESTS)

.PHONY: test-one-device
test-one-device: install ## Run the rules' tests on one device: with several, as in `make test`, traces are not changed in place.
	JAX_NUM_CPU_DEVICES=1 $(BIN)/python -m pytest $(PYTEST_ARGS) $(ONE_DEVICE_TESTS)

.PHONY: test-tpu
test-tpu: ## Compile small train steps with the TPU's own compiler and read what it made of them; no TPU is needed.
	@if $(MAKE) --no-print-directory $(TPU)/.installed; then \
	  $(TPU)/bin/python -m pytest -n 0 tests/tpu; \
	else \
	  echo "The TPU's compiler (libtpu) could not be installed in $(TPU): skipping the tests that need it."; \
	fi

.PHONY: lint
lint: install ## Check style and types.
	@failed=0; \
	for check in "ruff check" "ruff format --check" mypy; do echo "$(BIN)/$$check"; $(BIN)/$$check || failed=1; done; \
	exit $$failed

.PHONY: format
format: install ## Format the code and mend what can be mended.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: lock
lock: ## Renew constraints/ from what the registries offer now.
	$(call lock,$(shell $(FIND_PYTHON) 3.11))
	$(call lock,$(shell $(FIND_PYTHON) 3.13))

.PHONY: clean
clean: ## Remove environments, caches and builds.
	rm -rf $(VENV) $(NEWEST) $(TPU) .venv-lock build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
