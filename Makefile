# Two commands matter: `make demo` and `make test`. Both set up .venv themselves; VENV= uses the current interpreter
# and installs nothing.
PYTHON ?= python3
VENV ?= .venv

ifeq ($(VENV),)
PY := $(PYTHON)
else
PY := $(VENV)/bin/python
endif

export PYTHONPATH := python:$(PYTHONPATH)

.PHONY: build test
build:
	$(PY) setup.py -q build_ext --inplace

test: build
	$(PY) -m pytest
