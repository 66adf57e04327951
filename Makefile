# `make demo` and `make test` do all set-up themselves: .venv, the pinned requirements, the build in place.
# A second call reuses all of it. VENV= takes the current interpreter and installs nothing. `make test TORCH=2.15.0` and
# the like take another torch than the pinned one, in an environment of its own; the library in place is then that one's.
PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
BENCH ?=
SANITIZER ?= compute-sanitizer
# Processes of the tests; those of `make test-cuda` share the GPU and the cache of compiled kernels.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))

ifeq ($(strip $(VENV)),)
$(if $(TORCH),$(error TORCH= needs an environment to install torch $(TORCH) in: leave VENV out))
PY := $(PYTHON)
BIN :=
requirements = $(if $(1),)
else
PY := $(VENV)/bin/python
BIN := $(VENV)/bin/
requirements = $(VENV)/.installed-$(1)
endif

export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))
CXX_SOURCES = $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-cuda sanitize bench lint format docs build wheel sdist clean
.DEFAULT_GOAL := test
# Two pips in one environment would trip over each other under `make -j`; ninja is parallel by itself.
.NOTPARALLEL:

demo: build
	@echo "Training a character model on the documentation inside Python: at most two minutes on two CPU cores"
	@$(PY) examples/char_lm.py --output build/char_lm.png $(DEMO)

# PYTEST="-m 'not slow'" leaves out what takes most of the time; WORKERS=0 runs all in one process. What Python and pytest
# make of the sources is kept, as each of the processes reads them all. A process takes tests that follow each other, which
# share what their files prepare, and at the end from what others have left.
test: export PYTHONDONTWRITEBYTECODE =
test: $(call requirements,test) build
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST)

test-cuda: $(call requirements,test) build
	WEFT_REQUIRE_CUDA=1 $(PY) -m pytest -m cuda -n $(WORKERS) $(PYTEST)

# Weft's kernels alone, on small cases, every tensor in an allocation of its own. Needs compute-sanitizer 2026.4, which
# PyPI's nvidia-cuda-sanitizer-api 13.5 has: that of CUDA 13.0 crashes in racecheck on some of them. PARTS="vertex offload"
# runs the parts of these rooms alone.
sanitize: $(call requirements,test) build
	$(PY) -m tests.sanitized $(PARTS) --under memcheck racecheck synccheck --sanitizer "$(SANITIZER)"

bench: build
	$(PY) -m benchmarks.scan $(BENCH)
	$(PY) -m benchmarks.rnn $(BENCH)
	$(PY) -m benchmarks.vertex $(BENCH)
	$(PY) -m benchmarks.offload $(BENCH)
	$(PY) -m benchmarks.sparse $(BENCH)
	$(PY) -m benchmarks.ranks $(BENCH)
	$(PY) -m benchmarks.plot

lint: $(call requirements,lint)
	$(BIN)ruff check
	$(BIN)ruff format --check
	$(BIN)clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(call requirements,lint)
	$(BIN)ruff check --fix
	$(BIN)ruff format
	$(BIN)clang-format -i $(CXX_SOURCES)

docs: $(call requirements,docs) build
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

# Always asks ninja, which knows the headers and the flags of every object; with nothing to do it takes two seconds.
# For the GPUs of this machine, or for the CPU alone; WEFT_CUDA=0 or 1 and TORCH_CUDA_ARCH_LIST override. Each
# configuration has a folder of its own in build/.
build: export WEFT_CUDA ?= here
build: $(call requirements,demo)
	@echo "Building Weft: minutes from nothing, seconds where little has changed"
	@$(PY) .ci/progress.py build/build.log $(PY) setup.py -q build_ext --inplace

wheel: $(call requirements,build)
	$(PY) -m pip wheel . --no-build-isolation --no-deps -w dist

sdist: $(call requirements,dist)
	$(PY) -m build --sdist --no-isolation

clean:
	rm -rf build dist docs/_build python/weft/_build_info.py python/weft/_C*.so python/*.egg-info *.egg-info

ifneq ($(strip $(VENV)),)
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Weft needs Python 3.10 or newer: make PYTHON=...")'
	@echo "Making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The requirements include each other, so a change in one of them checks all.
$(VENV)/.installed-%: requirements/%.txt $(wildcard requirements/*.txt) | $(VENV)/bin/pip
	@mkdir -p $(VENV)/requirements
	@cp requirements/*.txt $(VENV)/requirements
	@$(if $(TORCH),sed -i 's/^torch==.*/torch==$(TORCH)/' $(VENV)/requirements/build.txt)
	@echo "Installing the packages of requirements/$(<F) into $(VENV); torch alone is gigabytes, some minutes the first time"
	@$(PY) -m pip install --disable-pip-version-check -q -r $(VENV)/requirements/$(<F)
	@touch $@
endif
