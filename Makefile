# Everything a developer runs. Needs only Python 3.10 or newer and GNU make 3.81 or newer (macOS has that one). Each target
# uses a virtual environment, which is created on first use and again when the dependencies change.
#
# torch is pinned by constraints.txt like everything else (torch==2.13.0). On Linux, PyPI's build is the CUDA one and
# includes several GB of libraries; without a GPU, the smaller build satisfies the same pin:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test
#
# Another Python: `make clean test PYTHON=python3.12`, or next to the first one: `make test PYTHON=python3.12 VENV=.venv312`.

PYTHON ?= python3
VENV ?= .venv

# A second environment with a CUDA build of torch and the definitions of real models. It needs no GPU.
CUDA_VENV ?= .venv-cuda

# A third one with the libraries of the field.
FIELD_VENV ?= .venv-field

# A fourth one that builds the documentation's site. It needs Python 3.11 or newer.
DOCS_VENV ?= .venv-docs

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CUDA_BIN := $(CUDA_VENV)/bin
CUDA_STAMP := $(CUDA_VENV)/.installed
FIELD_BIN := $(FIELD_VENV)/bin
FIELD_STAMP := $(FIELD_VENV)/.installed
DOCS_BIN := $(DOCS_VENV)/bin
DOCS_STAMP := $(DOCS_VENV)/.installed

# A worker for each processor, on one thread: with two, workers wait for each other. Bytecode is kept, even if the
# environment says otherwise: without it, half of the time of collecting goes into rewriting assertions again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=10 -n auto --maxprocesses=4

.DEFAULT_GOAL := help
.PHONY: help demo demo-sharded test docs site pictures links outputs long tapes lint bench compiled field histories suite deciding accuracy builds fake-gpu matrix host clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'

demo: $(STAMP) ## train a small model with MemGuard (examples/quickstart.py)
	$(BIN)/python examples/quickstart.py

demo-sharded: $(STAMP) ## train a small Llama on two processes under FSDP2 (examples/fsdp.py)
	$(BIN)/python examples/fsdp.py

test: $(STAMP) ## run the tests, and the examples in docstrings
	$(PYTEST)

docs: $(DOCS_STAMP) ## build the documentation's site in build/site, with five trainings; a warning or a dead link fails it
	$(DOCS_BIN)/python docs/gallery.py build/gallery
	cd build && $(CURDIR)/$(DOCS_BIN)/python ../docs/tour.py gallery
	$(DOCS_BIN)/python -m sphinx -q -W -E -d build/doctrees docs build/site
	@echo "Open build/site/index.html"

site: docs

pictures: $(STAMP) ## make the pictures of the documentation (docs/pictures.py; needs Chromium)
	$(BIN)/python docs/pictures.py

links: $(DOCS_STAMP) ## ask the network about the documentation's links to other sites
	$(DOCS_BIN)/python -m sphinx -q -W -b linkcheck -d build/doctrees docs build/links

outputs: $(STAMP) ## rewrite the output that the documentation shows (docs/outputs.py; ten minutes)
	$(BIN)/python docs/outputs.py

long: $(STAMP) ## run the tests that take long and show what a benchmark shows too
	$(PYTEST) -m long

tapes: $(STAMP) ## make the tapes anew that tests read in place of captures (tests/tapes/record.py)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tapes.record

lint: $(STAMP) ## check rules, formatting, types and the links between the pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/links.py

bench: $(STAMP) ## measure accuracy on the CPU, costs and advice, and compare with BatchSizeFinder
	$(BIN)/python benchmarks/cpu_truth.py
	$(BIN)/python benchmarks/overhead.py finder
	$(BIN)/python benchmarks/overhead.py malloc
	$(BIN)/python benchmarks/overhead.py process
	$(BIN)/python benchmarks/overhead.py step
	$(BIN)/python benchmarks/advice.py
	$(BIN)/python benchmarks/alternatives.py

compiled: $(STAMP) ## compare predictions for models under torch.compile with really compiled steps (needs g++; ten minutes)
	$(BIN)/python benchmarks/compiled.py

field: $(FIELD_STAMP) ## train models of some hundred libraries and compare with predictions (hours on two cores; continues)
	@mkdir -p build
	HF_HUB_OFFLINE=1 $(FIELD_BIN)/python benchmarks/field.py --json build/field.jsonl

histories: $(STAMP) ## replay and predict CUDA histories that others recorded: make histories FOLDER=path
	$(BIN)/python benchmarks/histories.py $(FOLDER) --predict

# A checkout of Lightning's repository, of the version that is installed.
CHECKOUT ?= build/lightning

suite: $(STAMP) ## run Lightning's own tests under MemGuard (CHECKOUT=a checkout of Lightning's repository)
	$(BIN)/python benchmarks/lightning_suite.py $(CHECKOUT)

accuracy: $(CUDA_STAMP) ## compare predictions for CUDA with measurements on GPUs (downloads several GB on first use; no GPU needed)
	$(CUDA_BIN)/python benchmarks/accuracy.py
	$(CUDA_BIN)/python benchmarks/overhead.py large

builds: $(STAMP) $(CUDA_STAMP) ## compare predictions for CUDA of a CPU-only build of torch with those of a CUDA build
	@mkdir -p build
	$(BIN)/python benchmarks/builds.py --write build/one.json
	$(CUDA_BIN)/python benchmarks/builds.py --compare build/one.json

fake-gpu: $(CUDA_STAMP) ## train with MemGuard on PyTorch's own CUDA allocator, on a GPU that is not there (needs a C compiler)
	$(CUDA_BIN)/python -m pip install --quiet --disable-pip-version-check pytest hypothesis
	$(CUDA_BIN)/python -m pytest -q tests/fake_gpu

deciding: $(STAMP) ## time and memory of a decision, of two checkouts in turns: make deciding BEFORE=path AFTER=path
	$(BIN)/python benchmarks/overhead.py decision $(BEFORE) $(or $(AFTER),.)

matrix: $(STAMP) ## test with other versions of Lightning, torch and Python (16 environments of several GB; an hour)
	$(BIN)/python benchmarks/matrix.py

host: $(STAMP) ## workers under a small /dev/shm (root on Linux), and forty life cycles, against another process (half an hour)
	$(BIN)/python benchmarks/loaders.py
	$(BIN)/python benchmarks/lifecycles.py

clean: ## remove the virtual environments, caches and files that trainings wrote
	rm -rf $(VENV) $(CUDA_VENV) $(FIELD_VENV) $(DOCS_VENV) .matrix .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist lightning_logs memguard runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone: it is the largest, and an interrupted installation continues from there.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "'$(PYTHON)' was not found. Pass Python 3.10 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "lightning-memguard needs Python 3.10 or newer; '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1)." >&2; \
	  echo "Pass a newer one, for example: make test PYTHON=python3.12" >&2; exit 1; }
	"$(PYTHON)" -m venv "$(VENV)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# torchvision has no matching CPU build; the package is installed without its pinned tools.
$(CUDA_STAMP): pyproject.toml
	"$(PYTHON)" -m venv "$(CUDA_VENV)"
	$(CUDA_BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.11.0 torchvision==0.26.0
	$(CUDA_BIN)/python -m pip install --quiet --disable-pip-version-check timm==1.0.31 transformers==5.23.0 -e .
	@touch $@

$(FIELD_STAMP): pyproject.toml constraints.txt benchmarks/data/field_requirements.txt
	"$(PYTHON)" -m venv "$(FIELD_VENV)"
	$(FIELD_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(FIELD_BIN)/python -m pip install --quiet --disable-pip-version-check -r benchmarks/data/field_requirements.txt -e .
	@touch $@

$(DOCS_STAMP): pyproject.toml constraints.txt docs/requirements.txt
	"$(PYTHON)" -m venv "$(DOCS_VENV)"
	$(DOCS_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(DOCS_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r docs/requirements.txt scikit-learn -e '.[tensorboard]'
	@touch $@
