# Everything runs in environments that scripts/build_env.py makes from the pinned lists in envs/ and caches.
ENGINE ?=
BACKEND ?= reference
OP ?=
HOST_PYTHON ?= python3

# Interpreter of an environment, built on first use: $(call python,unit|vllm|sglang)
python = $$($(HOST_PYTHON) scripts/build_env.py $(1))
# Engine tests must not look for a hub or phone home.
OFFLINE = HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# The jobs of `make test` share two cores; torch's own threads would only fight.
ONE_THREAD = OMP_NUM_THREADS=1
SHELL = bash
.SHELLFLAGS = -euo pipefail -c
.ONESHELL:

.PHONY: help python demo test lint test-unit unit-tests test-engines test-vllm test-sglang test-new-chip conformance bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

python:  ## print an interpreter's path, building its environment if needed [ENGINE=unit|vllm|sglang]
	@$(HOST_PYTHON) scripts/build_env.py $(or $(ENGINE),unit)

demo:  ## start a real engine on a real small model through baige-device and ask it a question [ENGINE=vllm|sglang]
	@python=$(call python,$(or $(ENGINE),vllm))
	exec "$$python" -m baige_device.cli demo --engine $(or $(ENGINE),vllm)

# Three jobs on two cores: an engine waits for its processes and for the network at times. The longest start first.
test:  ## everything that CI runs, three jobs at a time
	@$(MAKE) --no-print-directory -j3 lint test-vllm test-sglang unit-tests test-new-chip

lint:  ## formatting, types, import layers, documentation
	@python=$(call python,unit)
	"$$python" -m ruff check .
	"$$python" -m ruff format --check .
	"$$python" -m mypy
	"$$python" -c 'import sys; from importlinter.cli import lint_imports_command as main; sys.exit(main())'
	"$$python" -m mkdocs --quiet build --strict --site-dir site

test-unit: lint unit-tests  ## lint, and the unit tests: no engine, no device

unit-tests:
	@python=$(call python,unit)
	$(ONE_THREAD) "$$python" -m pytest -q tests/unit

test-engines:  ## real engines on small models, tokens compared with transformers'; a new chip, from scaffold to vLLM
	@$(MAKE) --no-print-directory test-vllm test-sglang test-new-chip

test-vllm test-sglang: test-%:
	@python=$(call python,$*)
	$(OFFLINE) $(ONE_THREAD) "$$python" -m pytest -v tests/engines/$*

test-new-chip:
	@python=$(call python,vllm)
	$(OFFLINE) $(ONE_THREAD) "$$python" scripts/new_chip_walkthrough.py

conformance:  ## every op contract on a backend [BACKEND=reference]
	@python=$(call python,unit)
	"$$python" -m baige_device.cli conformance --backend $(BACKEND)

bench:  ## time ops on this machine's accelerator, each verified first [OP="name ..."]
	@python=$(call python,unit)
	"$$python" -m baige_device.cli bench $(OP)

clean:  ## remove this checkout's environments and build outputs; the shared cache stays
	rm -rf .envs build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
