# What people do with baton, one word each. Needs Linux, make, and Python 3.11 or newer.
#
#   make serve [PORT=8000] [MODEL=NAME]    router, prefill and decode on this host; NAME is a
#                                          folder or a model of the Hugging Face hub
#   make test [WORKERS=2]                  every test that this machine can run, in minutes
#   make test-release                      the same in depth, and the tests that take long
#   make check                             format, lint, types, hygiene, unit tests
#   make sim [SEEDS=1000]                  schedules of faults on a simulated cluster, minutes
#   make soak [REQUESTS=10000 FAULTS=1000] kill and freeze processes under streams, some hours
#   make demo-model                        train the demo model anew, an hour on two cores
#   make bench                             benchmarks of the transports, also as JSON
#   make fmt                               format and sort imports
#   make docs                              write docs/config.md and metrics.md anew
#
# pip takes the CUDA build of torch on Linux by default. For the CPU build, which is much smaller,
# name its index: `make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu`.
# Transfers between hosts need NIXL: `make serve EXTRAS=nixl`.

PORT ?= 8000
MODEL ?=
VENV ?= .venv
PYTHON ?= python3
TORCH_INDEX ?=
EXTRAS ?=
SEEDS ?= 1000
REQUESTS ?= 10000
FAULTS ?= 1000
WORKERS ?= 2
ARGS ?=

# Nothing here talks to anybody by itself. A model that is no path is one of the hub, which is asked.
ifneq ($(and $(MODEL),$(if $(wildcard $(MODEL)),,hub)),hub)
export HF_HUB_OFFLINE = 1
endif
export DO_NOT_TRACK = 1
export RAY_USAGE_STATS_ENABLED = 0
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN = $(VENV)/bin
# A worker keeps its part of the files in order, so that it starts each shared cluster once.
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist worksteal
comma = ,
# A stamp says what was installed: other extras, or torch from another index, install again.
WISHES = $(if $(EXTRAS),-with-$(subst $(comma),-,$(EXTRAS)))
SERVE_STAMP = $(VENV)/.ready-to-serve$(WISHES)
TEST_STAMP = $(VENV)/.ready-to-test$(WISHES)
TORCH_STAMP = $(if $(TORCH_INDEX),$(VENV)/.torch-from-$(subst /,_,$(subst :,_,$(TORCH_INDEX))))
INSTALL = sh deploy/install.sh "$(VENV)" --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help serve test test-release check sim soak demo-model bench fmt docs install install-test clean

help:
	@sed -n '/^$$/q;s/^# \{0,1\}//p' Makefile

serve: $(SERVE_STAMP)
	@exec $(BIN)/baton serve --port $(PORT) $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: $(TEST_STAMP)
	@$(PYTEST) $(ARGS)

test-release: $(TEST_STAMP)
	@BATON_SCHEDULES=3000 $(PYTEST) -m "" --hypothesis-profile=release $(ARGS)

check: $(TEST_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p baton -p tools
	$(BIN)/pytest -q -m "not slow and not release" tests/hygiene tests/unit

sim: $(TEST_STAMP)
	$(BIN)/python -m tests.sim 1 $(SEEDS) $(ARGS)

soak: $(TEST_STAMP)
	$(BIN)/python -m tools.soak --requests $(REQUESTS) --faults $(FAULTS) $(ARGS)

demo-model: $(TEST_STAMP)
	$(BIN)/python -m tools.demo_model.train deploy/demo_checkpoint $(ARGS)
	$(BIN)/python -m tools.demo_model.evaluate --json deploy/demo_checkpoint/scores.json

bench: $(TEST_STAMP)
	@mkdir -p .baton
	$(BIN)/python -m tools.transfer --json .baton/transfer.json $(ARGS)

fmt: $(TEST_STAMP)
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

docs: $(TEST_STAMP)
	@$(BIN)/python docs/generate.py

install: $(SERVE_STAMP)

install-test: $(TEST_STAMP)

clean:
	rm -rf "$(VENV)" build src/*.egg-info

# The stamps make the second call instant, and a change of what is needed installs again.
$(SERVE_STAMP): pyproject.toml constraints.txt $(TORCH_STAMP) | $(BIN)/python
	@$(INSTALL) --editable ".$(if $(EXTRAS),[$(EXTRAS)])"
	@touch $@ $(VENV)/.ready-to-serve

$(TEST_STAMP): pyproject.toml constraints.txt $(TORCH_STAMP) | $(BIN)/python
	@$(INSTALL) --editable ".[dev,nixl$(if $(EXTRAS),$(comma)$(EXTRAS))]"
	@$(BIN)/python tools/install_helm.py
	@touch $@ $(SERVE_STAMP) $(VENV)/.ready-to-serve $(VENV)/.ready-to-test

ifneq ($(TORCH_STAMP),)
$(TORCH_STAMP): | $(BIN)/python
	@$(INSTALL) --no-deps --force-reinstall --index-url "$(TORCH_INDEX)" torch
	@rm -f "$(VENV)"/.torch-from-*
	@touch $@
endif

$(BIN)/python:
	@[ "$$(uname -s)" = Linux ] || { \
	  echo "baton needs Linux, and this is $$(uname -s): use a virtual machine or a container"; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "baton needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv "$(VENV)" || { rm -rf "$(VENV)"; \
	  echo "this Python cannot make environments; on Debian and Ubuntu: apt install python3-venv"; \
	  exit 1; }
