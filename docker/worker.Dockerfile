# One rank of the model. The same image serves CPU and GPU: PyPI's torch brings the CUDA libraries,
# and the NVIDIA container runtime the host's driver. PIP_ARGS can point to CPU-only wheels,
# APT_PACKAGES adds the C compiler that Triton needs on a GPU. BASE is an image with Python and its
# venv module, perhaps named by its digest.
ARG BASE=python:3.12-slim
FROM $BASE AS build

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY requirements/worker.txt requirements/torch.txt /requirements/
ARG PIP_ARGS=""
# Tests go, torch's among them, and its headers.
RUN pip install --no-cache-dir --no-compile --require-hashes --no-deps --only-binary :all: \
        $PIP_ARGS -r /requirements/worker.txt \
    && pip install --no-cache-dir --no-compile --no-warn-conflicts $PIP_ARGS -r /requirements/torch.txt \
    && pip uninstall --yes pip \
    && cd /opt/venv/lib/python3*/site-packages \
    && find . -depth -type d -name tests -exec rm -r {} + \
    && rm -rf torch/include torch/test torch/bin/test_*
COPY nano_vllm_grpc nano_vllm_grpc
COPY shared shared
COPY worker_svc worker_svc
# The health probe.
COPY deploy/__init__.py deploy/health.py deploy/
# Fails if something is missing, and leaves the bytecode of what is imported at every start.
RUN python -c "import deploy.health, worker_svc.__main__ as it; it.preload('auto')"

FROM $BASE
ARG APT_PACKAGES=""
RUN if [ -n "$APT_PACKAGES" ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends $APT_PACKAGES \
        && rm -rf /var/lib/apt/lists/* /var/cache/apt/*; \
    fi
# The cache is of compiled kernels and packed weights: a volume there outlives the container.
RUN useradd --create-home --uid 10001 nano && install --directory --owner nano /tmp/cache
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app

WORKDIR /app
USER 10001
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
ENV XDG_CACHE_HOME=/tmp/cache TRITON_CACHE_DIR=/tmp/cache/triton
ENTRYPOINT ["python", "-m", "worker_svc"]
