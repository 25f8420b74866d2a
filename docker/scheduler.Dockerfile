# The engine's scheduler, and its grammar host, whose xgrammar needs torch:
# PIP_ARGS can point to CPU-only wheels.
FROM python:3.12-slim

RUN useradd --create-home --uid 10001 nano
WORKDIR /app

COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY shared shared
COPY scheduler_svc scheduler_svc
# The health probe.
COPY deploy/__init__.py deploy/health.py deploy/
ARG PIP_ARGS=""
# Editable, since a wheel would contain only the client.
RUN pip install --no-cache-dir -c constraints.txt $PIP_ARGS -e ".[scheduler]"

USER nano
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["python", "-m", "scheduler_svc"]
