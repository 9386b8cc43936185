# From nothing but Python (3.11 or newer), pip and make: `make test` and `make demo`.
# Each environment is built once, and again only when what it is built from changes.

PYTHON ?= python3
VENV := .venv
ORACLES := .venv-oracles
ENGINES := vllm sglang llamacpp mlx mistralrs quantize
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
# every file that is downloaded is held to its hash, but torch's, whose build (CPU, CUDA, ROCm) is the machine's to choose
PINS := requirements/constraints.txt
LOCKS := requirements/lock.txt requirements/oracles.lock.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs oracles engines locks clean

help:  ## say what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# PASSIVE: threads do not wait by spinning, which on a machine that does other things as well is several times as fast
demo: $(VENV)/installed  ## train, upcycle, train on, compare: minutes on this machine's CPU, ends with runs/demo/report.html
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m examples.demo

# whole files to each process, those that take longest first (tests/conftest.py); programs are compiled once, not each time
test: lint oracles  ## lint, then all tests; those of the peers included, and of llama.cpp where it has a wheel
	@$(MAKE) --no-print-directory .venv-llamacpp/installed || echo "llama.cpp could not be installed: its tests are skipped"
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed  ## ruff, mypy --strict, plain English
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m tests.docs.style

docs: $(VENV)/installed  ## the documentation site, in site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

oracles: $(ORACLES)/installed  ## megatron-core and mergekit, which tests/oracles compare with

engines: $(VENV)/installed $(ENGINES:%=.venv-%/installed)  ## vLLM, SGLang, llama.cpp, MLX, mistral.rs on this CPU: do they read what we write? minutes
	ENGINES=all OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -rs tests/engines

locks:  ## renew the lock files from the pins (needs uv)
	uv pip compile $(LOCKED) --extra test pyproject.toml --output-file requirements/lock.txt
	uv pip compile $(LOCKED) requirements/oracles.txt --output-file requirements/oracles.lock.txt

clean:  ## remove what make made: environments and caches
	rm -rf $(VENV) $(ORACLES) $(ENGINES:%=.venv-%) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: pyproject.toml requirements/lock.txt $(PINS)
	$(call new_venv,$(VENV),requirements/lock.txt)
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

$(ORACLES)/installed: requirements/oracles.lock.txt $(PINS)
	$(call new_venv,$(ORACLES),requirements/oracles.lock.txt)
	@touch $@

# an engine's environment is held to versions
.venv-%/installed: requirements/engines-%.txt $(PINS)
	$(PYTHON) -m venv $(@D)
	$(if $(filter vllm quantize,$*),$(@D)/bin/python $(PIP_INSTALL) -c $(PINS) torch)
	$(@D)/bin/python $(PIP_INSTALL) --no-deps -r $<
	@touch $@

define new_venv
@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "$(PYTHON) is Python %d.%d; upcycle needs 3.11 or newer: make PYTHON=python3.11 ..." % sys.version_info[:2])'
$(PYTHON) -m venv $(1)
$(1)/bin/python $(PIP_INSTALL) --require-hashes --no-deps -r $(2)
$(1)/bin/python $(PIP_INSTALL) -c $(PINS) torch
endef

OF_TORCH = torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc cuda-runtime \
	cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
LOCKED = --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet -c $(PINS) \
	$(addprefix --no-emit-package ,$(OF_TORCH))
