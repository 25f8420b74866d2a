# The public API: tokenizer and stop strings, no torch. BASE is an image with Python and its venv
# module, optionally with a digest.
ARG BASE=python:3.12-slim
FROM $BASE AS build

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY requirements/frontend.txt /requirements/
ARG PIP_ARGS=""
RUN pip install --no-cache-dir --no-compile --require-hashes --no-deps --only-binary :all: \
        $PIP_ARGS -r /requirements/frontend.txt \
    && pip uninstall --yes pip setuptools \
    && find /opt/venv -depth -type d -name tests -exec rm -r {} +
COPY nano_vllm_grpc nano_vllm_grpc
COPY shared shared
COPY frontend frontend
# The health probe.
COPY deploy/__init__.py deploy/health.py deploy/
# Fails if a module is missing, and compiles the modules that every start imports.
RUN python -c "import deploy.health, frontend.__main__ as it; it.import_auto_tokenizer()"

FROM $BASE
# A volume for background responses gets the owner and mode of this directory.
RUN useradd --create-home --uid 10001 nano \
    && install --directory --owner nano --mode 700 /var/lib/nano/responses
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app

WORKDIR /app
USER 10001
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
ENTRYPOINT ["python", "-m", "frontend"]
