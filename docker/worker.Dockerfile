# One rank of the model, on CPU or GPU: PyPI's torch contains the CUDA libraries, and the NVIDIA
# container runtime adds the host's driver. PIP_ARGS can point to CPU-only wheels, APT_PACKAGES adds
# the C compiler that Triton needs on a GPU. BASE is an image with Python and its venv module,
# optionally with a digest. If it has no C++ compiler, the build installs Debian's.
ARG BASE=python:3.12-slim
FROM $BASE AS build

RUN command -v c++ \
    || { apt-get update && apt-get install --yes --no-install-recommends g++; }

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY requirements/worker.txt requirements/torch.txt /requirements/
ARG PIP_ARGS=""
# Removes all tests, and torch's headers.
RUN pip install --no-cache-dir --no-compile --require-hashes --no-deps --only-binary :all: \
        $PIP_ARGS -r /requirements/worker.txt \
    && pip install --no-cache-dir --no-compile --no-warn-conflicts $PIP_ARGS -r /requirements/torch.txt \
    && pip uninstall --yes pip \
    && cd /opt/venv/lib/python3*/site-packages \
    && find . -depth -type d -name tests -exec rm -r {} + \
    && rm -rf torch/include torch/test torch/bin/test_*
# The CPU kernels, for all CPUs. Other changes of the code do not compile them again.
COPY worker_svc/__init__.py worker_svc/errors.py worker_svc/user_cache.py worker_svc/
COPY worker_svc/kernels/__init__.py worker_svc/kernels/cpu_features.py worker_svc/kernels/
COPY worker_svc/kernels/cpu/__init__.py worker_svc/kernels/cpu/build.py worker_svc/kernels/cpu/
COPY worker_svc/kernels/cpu/native worker_svc/kernels/cpu/native
RUN python -m worker_svc.kernels.cpu.build --all
COPY nano_vllm_grpc nano_vllm_grpc
COPY shared shared
COPY worker_svc worker_svc
# The health probe.
COPY deploy/__init__.py deploy/health.py deploy/
# Fails if a module is missing, and compiles the modules that every start imports.
RUN python -c "import deploy.health, worker_svc.__main__ as it; it.preload('auto')"

FROM $BASE
ARG APT_PACKAGES=""
RUN if [ -n "$APT_PACKAGES" ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends $APT_PACKAGES \
        && rm -rf /var/lib/apt/lists/* /var/cache/apt/*; \
    fi
# The cache has packed weights and Triton's kernels: a volume there outlives the container.
RUN useradd --create-home --uid 10001 nano && install --directory --owner nano /tmp/cache
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app

WORKDIR /app
USER 10001
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
ENV XDG_CACHE_HOME=/tmp/cache TRITON_CACHE_DIR=/tmp/cache/triton
ENTRYPOINT ["python", "-m", "worker_svc"]
