# The engine's scheduler and its grammar host, whose xgrammar imports torch. PIP_ARGS can point to
# CPU-only wheels. BASE is an image with Python and its venv module, optionally with a digest.
ARG BASE=python:3.12-slim
FROM $BASE AS build

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY requirements/scheduler.txt requirements/torch.txt /requirements/
ARG PIP_ARGS=""
# Removes all tests, and torch's headers.
RUN pip install --no-cache-dir --no-compile --require-hashes --no-deps --only-binary :all: \
        $PIP_ARGS -r /requirements/scheduler.txt \
    && pip install --no-cache-dir --no-compile --no-warn-conflicts $PIP_ARGS -r /requirements/torch.txt \
    && pip uninstall --yes pip \
    && cd /opt/venv/lib/python3*/site-packages \
    && find . -depth -type d -name tests -exec rm -r {} + \
    && rm -rf torch/include torch/test torch/bin/test_*
COPY nano_vllm_grpc nano_vllm_grpc
COPY shared shared
COPY scheduler_svc scheduler_svc
# The health probe.
COPY deploy/__init__.py deploy/health.py deploy/
# Fails if a module is missing, and compiles the modules that every start imports.
RUN python -c "import deploy.health, scheduler_svc.__main__, scheduler_svc.grammar.compiler"

FROM $BASE
RUN useradd --create-home --uid 10001 nano
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app

WORKDIR /app
USER 10001
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
ENTRYPOINT ["python", "-m", "scheduler_svc"]
