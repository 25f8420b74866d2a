# The public API: tokenizer and stop strings, no torch. BASE may name an image by its digest.
ARG BASE=python:3.12-slim
FROM $BASE

RUN useradd --create-home --uid 10001 nano
WORKDIR /app

COPY requirements/frontend.txt requirements/
RUN pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: \
        -r requirements/frontend.txt
COPY shared shared
COPY frontend frontend
# The health probe.
COPY deploy/__init__.py deploy/health.py deploy/

USER nano
ENV PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
ENTRYPOINT ["python", "-m", "frontend"]
