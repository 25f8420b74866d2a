"""The command `nano-vllm-grpc`, which works only in a checkout."""

from __future__ import annotations

import importlib

from nano_vllm_grpc.private_stack import IS_CHECKOUT


def main() -> None:
    if not IS_CHECKOUT:
        raise SystemExit(
            "nano-vllm-grpc: this is the client library alone; the server and its commands run "
            "from a checkout of the project"
        )
    importlib.import_module("cli.app").app()


if __name__ == "__main__":
    main()
