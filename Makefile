# SPDX-License-Identifier: Apache-2.0
# make venv | unit | test | demo, on any Linux machine with Python 3.10 to 3.12, on a CPU.
#
#   VLLM_GAUDI_ROOT=<checkout or site-packages>  run on the real vllm-gaudi found there instead of the stand-in
#   VLLM_VERSION=<version>                       the vLLM to build, if not the default below
#   PYTHON=<interpreter>                         makes the venv
#   PIP_ARGS=<options>                           for pip, e.g. where a CPU build of torch is to be found

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := test
.PHONY: venv unit test demo

PYTHON ?= python3
VLLM_VERSION ?= $(if $(VLLM_GAUDI_ROOT),0.26.0,0.30.0)
VENV := .venv-$(VLLM_VERSION)
BIN := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/installed$(if $(VLLM_GAUDI_ROOT),-for-plugin)

TORCH := torch==2.13.0
# Of releases that need another one than those before.
SETUPTOOLS_0.33.0 := 78.1.1
TRANSFORMERS_0.33.0 := 5.20.2
# For building vLLM from its source, which pip must then do without isolation: vLLM's setup imports the torch it is for.
BUILD := setuptools==$(or $(SETUPTOOLS_$(VLLM_VERSION)),77.0.3) setuptools-scm setuptools-rust wheel ninja cmake packaging jinja2
# fastapi: from 0.137 on, vLLM 0.26's metrics middleware answers every request with status 500.
PINS := transformers==$(or $(TRANSFORMERS_$(VLLM_VERSION)),5.14.1) 'fastapi<0.137'
# What vllm-gaudi itself needs, and is not installed to bring.
PLUGIN := $(if $(VLLM_GAUDI_ROOT),pandas numba tblib==3.1.0)
# The linters are vllm-gaudi's, in its versions.
TOOLS := pytest==9.2.0 pytest-xdist==3.8.0 ruff==0.11.7 mypy==1.11.1 yapf==0.43.0

# One short line per package, nothing about those already there; large downloads are shown with their size.
BRIEF := sed -u -e '/is ignored: it is neither/d' -e '/^Requirement already/d' -e '/^\(Looking in\|Obtaining\)/d' \
	-e '/^ *Downloading.* ([0-9]*[0-9][0-9]\.[0-9] MB)/b' -e '/^ *\(Downloading\|Using cached\|Obtaining\)/d' \
	-e '/^ *\(Preparing\|Checking\|Created\|Stored\|Attempting\|Found\|Uninstalling\)/d' \
	-e '/^ *\(Building wheels\|Successfully\|━\)/d' \
	-e 's/^\(Collecting.*\) (from .*/\1/' -e 's,^Processing .*/\([^/ ]*\).*,Collecting \1,' \
	-e 's/^Installing collected packages.*/Installing them, about a minute/'
# Bytecode is written on first import: most of what is installed is never imported.
INSTALL := PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --no-compile $(PIP_ARGS)

venv: $(INSTALLED)

$(INSTALLED): Makefile pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
		|| { echo 'Python 3.10 to 3.12 is needed: name one with PYTHON=<interpreter>' >&2; exit 1; }
	@echo "[1/3] $(VENV): torch and what builds vLLM"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) $(TORCH) $(BUILD) 2>&1 | $(BRIEF)
	@echo "[2/3] $(VENV): vLLM $(VLLM_VERSION) from source, without kernels"
	@VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM_VERSION) \
		$(INSTALL) --no-build-isolation --no-deps --no-binary vllm vllm==$(VLLM_VERSION) 2>&1 | $(BRIEF)
	@echo "[3/3] $(VENV): vLLM's requirements, the tools and this package"
	@$(INSTALL) --no-build-isolation vllm==$(VLLM_VERSION) $(TORCH) $(PINS) $(PLUGIN) $(TOOLS) -e . 2>&1 | $(BRIEF)
	@touch $@

unit: venv
	$(BIN)/python -m pytest tests/unit

test: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/yapf --diff --recursive vllm_gaudi_ext
	$(BIN)/mypy vllm_gaudi_ext
	$(BIN)/python -m tests.hosts $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

demo: venv
	$(BIN)/python -m demo
