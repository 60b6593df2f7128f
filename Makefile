# make up      the whole mesh on this machine; Ctrl-C ends it        make up ARGS="--prefill 2 --decode 2 --dtype float32"
# make test    linters, types, protos and every test                 make test ARGS="tests/unit -k sampler"
# make bench   measurements                                          make down: end a mesh started with ARGS=--detach
# make chaos   the mesh under faults, every answer known             make chaos MINUTES=20 ARGS="--seed 1"
# make fuzz    wrong input for every way in, new each time           make fuzz MINUTES=10 ARGS="--surface HTTP --seed 1"
# make compose-test   the mesh in containers, all of it checked      make compose-test ARGS=--own-daemon
# make pictures       docs/pictures anew: a trace, the dashboards under load; needs a Prometheus server
# make clients-test   programs of others against it: aiperf, lm-evaluation-harness, Triton's client
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Of faults, for make chaos and make fuzz.
MINUTES ?= 20
# Index to take torch from, for example PyTorch's CPU builds; default: pip's own index.
TORCH_INDEX ?=
TORCH := torch==2.13.0

# Nothing outside this folder is written or cached.
export EPD_MODELS_DIR ?= $(CURDIR)/models
export EPD_RUN_DIR ?= $(CURDIR)/.run
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export BUF_CACHE_DIR ?= $(CURDIR)/$(VENV)/buf

# The Node example's packages, for its test.
NODE_PACKAGES := examples/node/node_modules/.package-lock.json
export npm_config_cache ?= $(CURDIR)/$(VENV)/npm

SOURCES := setup.py pyproject.toml constraints.txt $(wildcard protos/epd/*/*.proto)

.PHONY: help up down test lint protos bench chaos fuzz compose-test clients-test train-vlm docs pictures clean

help:
	@sed -n '1,8s/^# //p' Makefile

up: $(VENV)/.local-stamp
	@$(BIN)/epd up $(ARGS)

down: $(VENV)/.local-stamp
	@$(BIN)/epd down

test: $(VENV)/.dev-stamp $(NODE_PACKAGES) lint
	@$(BIN)/epd models get >/dev/null
	@$(BIN)/epd models get picture-vlm >/dev/null
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev-stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint protos

bench: $(VENV)/.dev-stamp
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m bench $(ARGS)

chaos: $(VENV)/.dev-stamp
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m tests.chaos --minutes $(MINUTES) $(ARGS)

fuzz: $(VENV)/.dev-stamp
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

# Other people's programs, whose packages do not go with ours: aiperf, lm-evaluation-harness, Triton's client.
clients-test: $(VENV)/.dev-stamp $(VENV)/clients/.stamp
	@$(BIN)/epd models get picture-vlm >/dev/null
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive EPD_CLIENTS=$(CURDIR)/$(VENV)/clients/bin $(BIN)/python -m pytest tests/clients/foreign_clients.py $(ARGS)

compose-test: $(VENV)/.dev-stamp
	$(BIN)/python -m tests.compose $(ARGS)

# The projector of picture-vlm, an hour or two; goes on where it was interrupted. Then commit the file it wrote.
train-vlm: $(VENV)/.dev-stamp
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m training $(ARGS)
	OMP_NUM_THREADS=2 $(BIN)/python -m training.evaluate

# What docs/ has of the code's own words.
docs: $(VENV)/.dev-stamp
	$(BIN)/python -m tests.configuration

# A trace, and the dashboards' own queries, drawn. ARGS="dashboards --minutes 4 --prometheus FILE"
pictures: $(VENV)/.dev-stamp
	@$(BIN)/epd models get picture-vlm >/dev/null
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m tests.pictures $(ARGS)

protos: $(VENV)/.dev-stamp
	$(BIN)/python setup.py --version

clean:
	rm -rf build epd *.egg-info .run .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/.torch-stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	@echo "Installing into $(VENV), once: about 1.5 GB, several minutes, mostly without a word"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade 'pip>=25'
	$(BIN)/python -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

$(VENV)/clients/.stamp: tests/clients/requirements.txt
	$(PYTHON) -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip install -qq --upgrade 'pip>=25'
	$(VENV)/clients/bin/python -m pip install -q -r tests/clients/requirements.txt
	@touch $@

$(NODE_PACKAGES): examples/node/package-lock.json
	@command -v npm >/dev/null || { echo 'The tests run a Node example: install Node 18 or newer with npm (apt-get install nodejs npm)'; exit 1; }
	npm ci --prefix examples/node --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# The stamp of a full development environment serves for running too.
$(VENV)/.local-stamp: $(VENV)/.torch-stamp $(SOURCES)
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[local]'
	@touch $@

$(VENV)/.dev-stamp: $(VENV)/.torch-stamp $(SOURCES)
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.local-stamp
