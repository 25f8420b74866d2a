# One rank of the model. The same image serves CPU and GPU: PyPI's torch brings the CUDA libraries,
# and the NVIDIA container runtime the host's driver. PIP_ARGS can point to CPU-only wheels,
# APT_PACKAGES adds the C compiler that Triton needs on a GPU. BASE may name an image by its digest.
ARG BASE=python:3.12-slim
FROM $BASE

ARG APT_PACKAGES=""
RUN if [ -n "$APT_PACKAGES" ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends $APT_PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --create-home --uid 10001 nano
WORKDIR /app

COPY requirements/worker.txt requirements/torch.txt requirements/
ARG PIP_ARGS=""
RUN pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: \
        $PIP_ARGS -r requirements/worker.txt \
    && pip install --no-cache-dir --no-warn-conflicts $PIP_ARGS -r requirements/torch.txt
COPY shared shared
COPY worker_svc worker_svc
# The health probe.
COPY deploy/__init__.py deploy/health.py deploy/

USER nano
ENV PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/tmp/numba TRITON_CACHE_DIR=/tmp/triton
ENTRYPOINT ["python", "-m", "worker_svc"]
