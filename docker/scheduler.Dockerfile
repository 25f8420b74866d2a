# The engine's scheduler: numpy and gRPC, no torch, no model files.
FROM python:3.12-slim

RUN useradd --create-home --uid 10001 nano
WORKDIR /app

COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY shared shared
COPY scheduler_svc scheduler_svc
# The health probe.
COPY deploy/__init__.py deploy/health.py deploy/
RUN pip install --no-cache-dir -c constraints.txt ".[scheduler]"

USER nano
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["python", "-m", "scheduler_svc"]
