"""`python -m cli`: the command line `nano-vllm-grpc`, in a checkout."""

from cli.app import app

app()
