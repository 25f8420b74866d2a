from __future__ import annotations

import subprocess
import sys

import pytest

from frontend.settings import FrontendSettings
from shared.config import SettingsError, load_settings


@pytest.mark.parametrize("service", ["frontend", "scheduler_svc", "worker_svc"])
def test_without_an_endpoint_the_library_is_not_imported(service: str) -> None:
    program = (
        f"import sys, {service}.__main__, shared.telemetry.tracing\n"
        "shared.telemetry.tracing.preload('')\n"
        f"assert shared.telemetry.tracing.open_tracing('', {service!r}) is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(SettingsError, match="otlp_endpoint"):
        load_settings(FrontendSettings, ["--otlp-endpoint", "localhost:4317"])
