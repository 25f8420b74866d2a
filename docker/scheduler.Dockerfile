# The engine's scheduler, and its grammar host, whose xgrammar needs torch: PIP_ARGS can point to
# CPU-only wheels, which come without Triton. BASE may name an image by its digest.
ARG BASE=python:3.12-slim
FROM $BASE

RUN useradd --create-home --uid 10001 nano
WORKDIR /app

COPY requirements/scheduler.txt requirements/torch.txt requirements/triton.txt requirements/
ARG PIP_ARGS=""
RUN pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: \
        $PIP_ARGS -r requirements/scheduler.txt \
    && pip install --no-cache-dir --no-warn-conflicts $PIP_ARGS -r requirements/torch.txt \
    && { python -c "import triton" \
        || pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: \
            $PIP_ARGS -r requirements/triton.txt; }
COPY shared shared
COPY scheduler_svc scheduler_svc
# The health probe.
COPY deploy/__init__.py deploy/health.py deploy/

USER nano
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["python", "-m", "scheduler_svc"]
