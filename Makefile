# A thin wrapper: sets up .venv once, then runs what you could also type yourself. `make PYTHON=python3.12 test` picks
# another interpreter.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# The package index has torch for Linux with gigabytes of CUDA alone; torch's own index has a build for CPUs.
CPU_INDEX := $(if $(shell command -v nvidia-smi),,--extra-index-url https://download.pytorch.org/whl/cpu)
DEMO := $(or $(wildcard $(READY)),.venv/demo)  # where the tests run, the demo does too

# Tests run side by side, two for each core. Compiled modules are kept, which not every machine does by itself.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto

.PHONY: demo test test-all flaky lab docs lessons site lint release clean

demo: $(DEMO)
	$(BIN)/rpcbench demo

test: $(READY)
	$(PYTEST)

test-all: $(READY)
	$(PYTEST) -m "not ray and not ssh and not slurm" --hypothesis-profile=long tests notebooks
	.ci/spawn
	.ci/oldest tests/notebook tests/cells/test_cells_from_scripts.py
	.ci/ray
	.ci/hosts

flaky: $(READY)
	$(BIN)/python tests/flaky.py

lab: $(READY)
	$(BIN)/rpcbench lab

docs: $(READY)
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_states.py

lessons: $(READY)
	$(BIN)/python docs/run_lessons.py
	$(BIN)/python docs/make_course.py

site: $(READY)
	$(BIN)/python docs/make_site.py
	@echo "The site is build/site/html/index.html"

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/mypy

release:  # all but the publication
	.ci/release

clean:
	rm -rf .venv dist build

define install
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Python 3.11 or later is needed: make PYTHON=python3.12")'
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv .venv
	$(if $(CPU_INDEX),$(BIN)/pip install --disable-pip-version-check --no-deps --retries 1 $(CPU_INDEX) -c constraints.txt torch)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e $(1)
	@touch $@
endef

$(READY): pyproject.toml constraints.txt
	$(call install,'.[dev]')

.venv/demo: pyproject.toml constraints.txt
	$(call install,. scikit-learn)
