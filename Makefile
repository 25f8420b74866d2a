PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup protos up down ps logs chat bench test check clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

# The stamp names the Python it was made with, so that a moved or upgraded checkout makes it anew.
STAMP := .venv/.setup-done
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP)  ## make .venv with pinned dependencies

protos: $(STAMP)  ## regenerate shared/pb from protos/
	PATH=$(BIN):$$PATH python -m grpc_tools.protoc -Ishared/pb=protos --python_out=. \
		--mypy_out=quiet:. --grpc_python_out=. --mypy_grpc_out=quiet:. protos/*.proto
