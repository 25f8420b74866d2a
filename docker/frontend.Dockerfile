# The public API: tokenizer and stop strings, no torch.
FROM python:3.12-slim

RUN useradd --create-home --uid 10001 nano
WORKDIR /app

COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY shared shared
COPY frontend frontend
# The health probe.
COPY deploy/__init__.py deploy/health.py deploy/
# Editable, since a wheel would hold the client alone.
RUN pip install --no-cache-dir -c constraints.txt -e ".[frontend]"

USER nano
ENV PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
ENTRYPOINT ["python", "-m", "frontend"]
