# From nothing but Python (3.11 or newer), pip and make: `make test` and `make demo`.
# Each environment is built once, and again only when what it is built from changes.

PYTHON ?= python3
VENV := .venv
ORACLES := .venv-oracles
CONSTRAINTS := requirements/constraints.txt
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help demo test lint oracles clean

help:  ## say what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# PASSIVE: threads do not wait by spinning, which on a machine that does other things as well is several times as fast
demo: $(VENV)/installed  ## train, upcycle, train on, compare: minutes on this machine's CPU, ends with runs/demo/report.html
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m evaluation.demo

test: lint oracles  ## lint, then all tests; those of the peers included
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2

lint: $(VENV)/installed  ## ruff and mypy --strict
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

oracles: $(ORACLES)/installed  ## megatron-core and mergekit, which tests/oracles compare with

clean:  ## remove what make made: environments and caches
	rm -rf $(VENV) $(ORACLES) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(call new_venv,$(VENV))
	$(VENV)/bin/python $(PIP_INSTALL) -e ".[test]"
	@touch $@

$(ORACLES)/installed: requirements/oracles.txt $(CONSTRAINTS)
	$(call new_venv,$(ORACLES))
	$(ORACLES)/bin/python $(PIP_INSTALL) -r requirements/oracles.txt
	@touch $@

define new_venv
@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "$(PYTHON) is Python %d.%d; upcycle needs 3.11 or newer: make PYTHON=python3.11 ..." % sys.version_info[:2])'
$(PYTHON) -m venv $(1)
endef
