# One rank of the model. The same image serves CPU and GPU: PyPI's torch brings the CUDA libraries,
# the host's driver comes with the NVIDIA container runtime. PIP_ARGS can point to CPU-only wheels,
# APT_PACKAGES adds the C compiler that Triton needs on a GPU.
FROM python:3.12-slim

ARG APT_PACKAGES=""
RUN if [ -n "$APT_PACKAGES" ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends $APT_PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --create-home --uid 10001 nano
WORKDIR /app

COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY shared shared
COPY worker_svc worker_svc
# The health probe.
COPY deploy/__init__.py deploy/health.py deploy/
ARG PIP_ARGS=""
# Editable, since a wheel would hold the client alone.
RUN pip install --no-cache-dir -c constraints.txt $PIP_ARGS -e ".[worker]"

USER nano
ENV PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 NUMBA_CACHE_DIR=/tmp/numba TRITON_CACHE_DIR=/tmp/triton
ENTRYPOINT ["python", "-m", "worker_svc"]
