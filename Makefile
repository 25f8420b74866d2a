# `make help` lists the targets, docs/reference/settings.md explains the variables. Unset ones are not passed
# on, so that the services' own defaults apply.
PYTHON ?= python3
BIN := .venv/bin
CLI := $(BIN)/nano-vllm-grpc

OF_ENGINE := DEVICE DTYPE QUANTIZATION KV_DTYPE TP PP PP_LAYERS MAX_NUM_SEQS MAX_NUM_BATCHED_TOKENS \
	MAX_NUM_PREFILL_TOKENS MAX_MODEL_LEN MAX_WAITING KV_BLOCKS BLOCK_SIZE MEMORY_UTILIZATION ATTENTION ENFORCE_EAGER BATCH_INVARIANT CACHE_DIR CACHE_DIR_GB CACHE_DIR_MB_PER_S SYNC SPECULATION DRAFT_QUANTIZATION
SECURITY := TLS_CERT TLS_KEY TLS_CLIENT_CA INTERNAL_TLS_CERT INTERNAL_TLS_KEY INTERNAL_TLS_CA \
	INTERNAL_TLS_ROLES AUTH_TOKENS_FILE MAX_REQUESTS_PER_CLIENT REFLECTION ALLOW_PLAINTEXT \
	ALLOW_PUBLIC_PLAINTEXT
STACK := MODEL SERVED_MODEL_NAME POOLING $(OF_ENGINE) $(SECURITY) ENGINES FRONTENDS SPARES HOST PORT HTTP_PORT UI_PORT SERVICES RANKS METRICS \
	OTLP_ENDPOINT TRACE_SAMPLE_RATIO RUNTIME
ADDRESS = $(or $(HOST),127.0.0.1):$(or $(PORT),50051)

# $(call flags,A B_C): --a 'value' --b-c 'value', for those variables that are set;
# $(call environment,A B_C): the same as NANO_A='value' NANO_B_C='value'.
quote = '$(subst ','\'',$(1))'
flags = $(foreach name,$(1),$(if $($(name)),--$(shell echo $(name) | tr A-Z_ a-z-) $(call quote,$($(name)))))
environment = $(foreach name,$(1),$(if $($(name)),NANO_$(name)=$(call quote,$($(name)))))

KNOWN := $(STACK) PYTHON PIP_ARGS ARGS SERVICE ENGINE HANDOVER_TIMEOUT_S IN OUT MODE STEPS \
	GPU_PYTHON BUILDER BASE SEEDS SEED FAULTS ATTACK CHECK \
	MEMORY_LIMIT WORKER_MEMORY_LIMIT TMP_SIZE SHM_SIZE
# A word of a value may look like a variable, but make has none of that name.
UNKNOWN := $(strip $(foreach word,$(filter-out $(addsuffix =%,$(KNOWN)),$(MAKEOVERRIDES)),$(foreach \
	name,$(firstword $(subst =, ,$(subst :,,$(word)))),$(if $(findstring command line,$(origin $(name))),$(name)))))
ifneq ($(UNKNOWN),)
$(error $(UNKNOWN): unknown variable$(addprefix ; did you mean ,$(shell $(PYTHON) -c "import difflib, sys; \
	print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:], 1))" $(firstword $(UNKNOWN)) $(KNOWN))))
endif

# Variables count only on make's command line: a shell may have a MODEL or an IN for something else,
# and some export HOST, the machine's name.
FROM_SHELL := $(foreach name,$(filter-out PYTHON PIP_ARGS BUILDER BASE GPU_PYTHON,$(KNOWN)),\
	$(if $(filter environment,$(origin $(name))),$(name)))
$(foreach name,$(FROM_SHELL),$(if $(filter HOST,$(name)),,$(shell echo \
	"make: $(name) of the environment is ignored; make $(or $(MAKECMDGOALS),up) $(name)=... passes it" >&2))$(eval $(name) :=))

.DEFAULT_GOAL := help
.PHONY: help setup protos up down restart scale ps logs top profile chat generate doctor bench simulate chaos abuse gpu-check \
	images docs docs-serve test test-system soak check lock clean check-style check-types check-imports check-protos check-stubs check-docs check-house

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# The stamp's name depends on the checkout's path and the Python, so that moving or upgrading them
# makes a new environment. The lock lets one of several `make`s do the work while the others wait.
# All files but torch's have their hashes in the repository. Only this project is built, by a
# setuptools with such a hash. All that torch needs is installed before, except CUDA's libraries and
# Triton, which its CUDA builds install. With a CPU build, xgrammar and the tests still need Triton,
# in the version of the CUDA build.
TRITON := triton==3.7.1
# Without an NVIDIA GPU, torch (and nothing else) comes from here.
CPU_WHEELS := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PIP_HASHED := $(PIP) --require-hashes --no-deps --only-binary :all:
STAMP := .venv/.setup-$(shell echo "$(CURDIR) $$($(PYTHON) -V)" | cksum | cut -d ' ' -f 1)
INSTALLED := pyproject.toml requirements/dev.txt requirements/torch.txt requirements/triton.txt
$(STAMP): $(INSTALLED)
	@mkdir -p .run && exec 9>.run/setup.lock && flock 9 && \
	if [ -e $@ ] && [ -z "$$(find $(INSTALLED) -newer $@)" ]; then exit 0; fi && \
	echo "installing into .venv" && \
	if [ ! -e $@ ]; then $(PYTHON) -m venv --clear .venv; fi && \
	$(PIP_HASHED) $(PIP_ARGS) -r requirements/dev.txt && \
	{ [ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || \
		$(PIP) --no-deps --index-url $(CPU_WHEELS) --retries 0 --timeout 5 -r requirements/torch.txt 2>/dev/null || \
		echo "no CPU build of torch from $(CPU_WHEELS); the default index may have gigabytes of CUDA"; } && \
	$(PIP) --no-warn-conflicts $(PIP_ARGS) -r requirements/torch.txt && \
	{ $(BIN)/python -c 'import torch; exit(not torch.version.cuda)' || \
		$(PIP_HASHED) $(PIP_ARGS) -r requirements/triton.txt; } && \
	$(PIP) --no-deps --no-build-isolation -e . && \
	touch $@

# The kernels of workers on a CPU, so that the first start need not compile them. Without a compiler,
# workers on a GPU do start.
KERNELS := $(STAMP)-kernels
COMPILE = @$(BIN)/python -m worker_svc.kernels.cpu.build || echo "no worker will start on a CPU"; touch $(KERNELS)
$(KERNELS): $(STAMP) worker_svc/kernels/cpu/build.py $(wildcard worker_svc/kernels/cpu/native/*.*)
	$(COMPILE)

# Ray is installed on demand.
$(STAMP)-ray: $(STAMP) requirements/ray.txt
	$(PIP_HASHED) $(PIP_ARGS) -r requirements/ray.txt && touch $@
READY := $(KERNELS)$(if $(filter ray,$(RUNTIME)), $(STAMP)-ray)

# Compiles damaged kernels again, too, so it does not look at the stamp.
setup: $(STAMP) $(filter-out $(KERNELS),$(READY))  ## make .venv with pinned dependencies (PIP_ARGS: extra arguments for pip; RUNTIME=ray: with Ray)
	$(COMPILE)

up: $(READY)  ## start the stack, wait until it serves, show a first completion
	@$(CLI) up $(call flags,$(STACK))

down: $(READY)  ## stop the stack
	@$(CLI) down $(call flags,PORT RUNTIME)

restart: $(STAMP)  ## restart all processes, one at a time, while requests continue (SERVICE, ENGINE: only this one; MODEL: a new one)
	@$(CLI) restart $(call flags,PORT SERVICE ENGINE MODEL HANDOVER_TIMEOUT_S)

scale: $(READY)  ## start or stop engines of the running stack until it has ENGINES, while requests continue
	@$(CLI) scale $(call flags,PORT RUNTIME ENGINES)

ps: $(READY)  ## show a line per process: name, index, pid, address, state
	@$(CLI) ps $(call flags,PORT RUNTIME)

logs: $(READY)  ## show the logs and follow them (SERVICE: only this one)
	@$(CLI) logs $(call flags,PORT RUNTIME SERVICE)

top: $(STAMP)  ## show the load of the engines, live
	@$(CLI) top $(call flags,PORT)

profile: $(STAMP)  ## record the workers' next steps with torch's profiler (STEPS: how many)
	@$(CLI) profile $(call flags,PORT STEPS)

chat: $(STAMP)  ## talk to the model
	@$(CLI) chat --address $(call quote,$(ADDRESS)) $(ARGS)

generate: $(STAMP)  ## complete the prompts in IN, JSON lines, to OUT; run it again to continue (ARGS=--help lists more)
	@$(CLI) generate $(if $(IN),$(call quote,$(IN))) $(if $(OUT),$(call quote,$(OUT))) \
		--address $(call quote,$(ADDRESS)) $(ARGS)

doctor: $(KERNELS)  ## find problems that keep make up, with the same variables, from starting a stack
	@$(CLI) doctor $(call flags,$(filter-out RUNTIME,$(STACK)))

bench: $(KERNELS)  ## run benchmarks (MODE, OUT: a JSON file, PORT: of a running stack; ARGS=--help lists more)
	@$(call environment,$(OF_ENGINE)) $(CLI) bench $(call flags,MODE OUT MODEL) \
		$(if $(PORT),--address $(call quote,$(ADDRESS))) $(ARGS)

gpu-check: $(if $(GPU_PYTHON),,$(STAMP))  ## test and measure the worker on this machine's GPU (GPU_PYTHON: replaces .venv)
	@$(or $(GPU_PYTHON),$(BIN)/python) -m bench.gpu $(if $(OUT),--out $(call quote,$(OUT))) $(ARGS)

IMAGES := frontend scheduler worker
BUILDER ?= $(or $(shell for each in docker podman buildah; do if command -v $$each >/dev/null; then echo $$each; break; fi; done),docker) build
images:  ## build the container images for CPUs on BASE, which has Python (BUILDER: docker, podman or buildah build; PIP_ARGS)
	@for image in $(IMAGES); do \
		$(BUILDER) --file docker/$$image.Dockerfile --build-arg BASE=$(call quote,$(or $(BASE),python:3.12-slim)) \
			--build-arg PIP_ARGS=$(call quote,$(or $(PIP_ARGS),--extra-index-url $(CPU_WHEELS))) \
			--tag nano-vllm-grpc/$$image$$(test $$image != worker || echo :cpu) . || exit; \
	done

# Without the variable, the theme prints an advertisement.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

# A module's tests run in one process and share its fixtures. Modules begin in their own order: that of
# xdist, by the number of tests, would leave some of the longest for the end.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
test: $(KERNELS)  ## run the tests that need at most one stack, on all cores (ARGS: for pytest)
	$(PYTEST) -m "not system and not soak" $(ARGS)

test-system: $(KERNELS)  ## run the tests of whole stacks: faults, security, HTTP, the dashboard (ARGS: for pytest)
	$(PYTEST) -m "system and not soak" $(ARGS)

soak: $(KERNELS)  ## run all random tests for hours, with new seeds (OUT: a JSON file; run it again to continue)
	@$(BIN)/python -m tests.soak $(call flags,OUT) $(ARGS)

simulate: $(STAMP)  ## run the scheduler under simulated faults (SEEDS: how many, SEED: the first)
	@$(BIN)/python -m tests.simulation $(call flags,SEEDS SEED)

chaos: $(KERNELS)  ## kill and stop processes of a stack under load (FAULTS: how many, SEED, ENGINES, OUT; ARGS=--help lists more)
	@$(BIN)/python -m tests.chaos $(call flags,FAULTS SEED ENGINES OUT) $(ARGS)

abuse: $(KERNELS)  ## attack a stack beside honest clients (ATTACK: which, CHECK: the maximum factor, OUT; ARGS=--help lists more)
	@$(BIN)/python -m tests.abuse $(if $(ATTACK),--attack $(ATTACK)) $(call flags,CHECK OUT) $(ARGS)

docs: $(STAMP)  ## write the reference pages and build the site of the documents into .run/site
	$(BIN)/python -m tools.reference
	$(MKDOCS) build --quiet

docs-serve: $(STAMP)  ## show the site of the documents at http://127.0.0.1:8001, and changes at once
	$(MKDOCS) serve --dev-addr 127.0.0.1:8001

check: check-style check-types check-imports check-protos check-stubs check-docs check-house  ## check style, types, imports, protos, stubs, documents and the limits of size

# Each is also a hook in .pre-commit-config.yaml.
check-style: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

check-types: $(STAMP)
	$(BIN)/mypy

check-imports: $(STAMP)
	$(BIN)/lint-imports

check-protos: $(STAMP)
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/released.binpb

check-stubs: $(STAMP)
	@stubs=$$(mktemp -d) && trap 'rm -r "$$stubs"' EXIT && $(call protoc,"$$stubs") && \
	for stubs_of in nano_vllm_grpc/pb shared/pb; do \
		diff -r --exclude=__init__.py --exclude=__pycache__ $$stubs_of "$$stubs/$$stubs_of" || exit; \
	done && echo "the stubs are up to date"

check-docs: $(STAMP)
	$(BIN)/python -m tools.reference --check
	$(BIN)/python -m tools.prose
	@site=$$(mktemp -d) && trap 'rm -r "$$site"' EXIT && $(MKDOCS) build --quiet --site-dir "$$site" && \
	echo "the site has no broken link"

check-house: $(STAMP)
	$(BIN)/python -m tools.house

protos: $(STAMP)  ## regenerate nano_vllm_grpc/pb and shared/pb from protos/
	$(call protoc,.)

# Locked versions stay, unless ARGS=--upgrade; images get the versions of requirements/dev.txt.
LOCK := uv pip compile --quiet --universal --python-version 3.11 --no-build --generate-hashes \
	--no-annotate --custom-compile-command 'make lock' $(ARGS)
LOCK_EXTRA := $(LOCK) pyproject.toml --constraints requirements/torch.txt \
	--excludes requirements/unlocked.txt --no-emit-package torch
lock:  ## lock packages that fit pyproject.toml, with the hashes of all their files (with uv, docs.astral.sh/uv)
	$(LOCK_EXTRA) --extra dev --output-file requirements/dev.txt
	for extra in $(IMAGES) ray; do \
		$(LOCK_EXTRA) --extra $$extra --output-file requirements/$$extra.txt \
			--constraints requirements/dev.txt || exit; \
	done
	$(LOCK) requirements/test-clients.in --output-file requirements/test-clients.txt
	$(LOCK) requirements/test-more-clients.in --output-file requirements/test-more-clients.txt \
		--excludes requirements/unlocked.txt --no-emit-package torch
	echo $(TRITON) | $(LOCK) --no-deps --output-file requirements/triton.txt -

protoc = $(call stubs,$(1),nano_vllm_grpc/pb,frontend) && \
	$(call stubs,$(1),shared/pb,scheduler worker)
stubs = PATH=$(BIN):$$PATH python -m grpc_tools.protoc -I$(2)=protos --python_out=$(1) --mypy_out=quiet:$(1) \
	--grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(patsubst %,protos/%.proto,$(3))

clean:  ## stop all stacks, remove .venv and everything generated
	-@$(CLI) down --all
	rm -rf .venv .run build *.egg-info .*_cache .hypothesis worker_svc/kernels/cpu/native/build
	find . -name __pycache__ -prune -exec rm -rf {} +
