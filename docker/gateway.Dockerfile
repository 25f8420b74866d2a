# The HTTP gateway. BASE is an image with Python and its venv module, optionally with a digest.
ARG BASE=python:3.12-slim
FROM $BASE AS build

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY requirements/gateway.txt /requirements/
ARG PIP_ARGS=""
RUN pip install --no-cache-dir --no-compile --require-hashes --no-deps --only-binary :all: \
        $PIP_ARGS -r /requirements/gateway.txt \
    && pip uninstall --yes pip setuptools \
    && find /opt/venv -depth -type d -name tests -exec rm -r {} +
COPY nano_vllm_grpc nano_vllm_grpc
COPY shared shared
COPY frontend/__init__.py frontend/settings.py frontend/
COPY frontend/callers/__init__.py frontend/callers/tenants.py frontend/callers/
COPY worker_svc/__init__.py worker_svc/errors.py worker_svc/user_cache.py worker_svc/
COPY worker_svc/models/__init__.py worker_svc/models/chat_formats.py worker_svc/models/families.py \
    worker_svc/models/
COPY deploy/__init__.py deploy/errors.py deploy/gateway.py deploy/health.py deploy/ports.py \
    deploy/stack.py deploy/
# Fails if a module is missing, and compiles the modules that every start imports.
RUN python -c "import deploy.gateway"

FROM $BASE
RUN useradd --create-home --uid 10001 nano
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app

WORKDIR /app
USER 10001
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
ENTRYPOINT ["python", "-m", "deploy.gateway"]
