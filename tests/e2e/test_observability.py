"""The real Prometheus, with the configuration in `deploy/observability`, on a stack that has served
and lost processes: every query of the dashboard and of the alerts is asked."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.ports import free_port
from nano_vllm_grpc import LLM, SamplingParams, StructuredOutput
from tests.stack import ROOT, RealStack, running_stack
from tests.waiting import wait_for

OBSERVABILITY = ROOT / "deploy" / "observability"
NO_INOTIFY = "Error adding file watcher"
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="prometheus is not installed (Debian: apt-get install prometheus)",
    ),
]


class Prometheus:
    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url) as response:
            answer = json.load(response)
        assert answer["status"] == "success"
        return answer["data"]

    def query(self, expression: str) -> list[float]:
        """The numbers that an expression has now."""
        values = [float(each["value"][1]) for each in self.ask("query", query=expression)["result"]]
        return [value for value in values if not math.isnan(value)]

    def wait(self, expression: str) -> None:
        try:
            wait_for(lambda: self.query(expression), f"Prometheus to see {expression}")
        except TimeoutError:
            for target in self.ask("targets")["activeTargets"]:
                print(target["scrapeUrl"], target["labels"], target["lastError"])
            raise


@contextmanager
def running_prometheus(stack: RealStack, directory: Path) -> Iterator[Prometheus]:
    """Prometheus with the project's configuration, which asks each second, for `stack`."""
    text = (OBSERVABILITY / "prometheus.yml").read_text()
    for ours, its in (
        ("../../.run/50051", str(stack.directory)),
        ("_interval: 5s", "_interval: 1s"),
    ):
        assert ours in text
        text = text.replace(ours, its)
    (directory / "prometheus.yml").write_text(text)
    shutil.copy(OBSERVABILITY / "alerts.yml", directory)
    address = f"127.0.0.1:{free_port()}"
    log = directory / "log"
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
    ]

    started: list[subprocess.Popen[bytes]] = []

    def stop() -> None:
        started[-1].terminate()
        started[-1].wait()

    def start() -> bool:
        with log.open("w") as file:
            started.append(subprocess.Popen(command, stdout=file, stderr=file))
        wait_for(lambda: "ready to receive" in log.read_text(), "Prometheus")
        # While this user's other processes have all inotify instances, it never sees a target.
        wait_for(
            lambda: prometheus.ask("targets")["activeTargets"] or NO_INOTIFY in log.read_text(),
            "Prometheus to find targets",
        )
        if NO_INOTIFY not in log.read_text():
            return True
        stop()
        return False

    prometheus = Prometheus(address)
    try:
        wait_for(start, "a Prometheus that can watch files")
        yield prometheus
    finally:
        stop()
        print(log.read_text())


def expressions_of_dashboard() -> list[str]:
    dashboard = json.loads((OBSERVABILITY / "grafana.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [each.replace("$__rate_interval", "5m").replace("$stack", ".*") for each in found]


def test_alerts_are_of_one_stack(tmp_path: Path) -> None:
    """Stack `b` serves, but `a` and `c` do not. No scheduler of `c` answers."""
    series = {
        'up{job="nanovllm",stack="a"}': "1x24",
        'up{job="nanovllm",stack="b"}': "1x24",
        'up{job="nanovllm",stack="c"}': "1x24",
        'nanovllm:engine_ready{stack="a"}': "0x24",
        'nanovllm:engine_ready{stack="b"}': "1x24",
        'nanovllm:restarts_total{stack="b",instance="worker-0"}': "0 0 0 1 1 2 3x18",
        'nanovllm:process_restarts_total{stack="c",instance="supervisor-0",process="worker-1"}': (
            "0 0 0 1 1 2 3x18"
        ),
    }
    case = {
        "interval": "5s",
        "input_series": [{"series": name, "values": each} for name, each in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count by (stack) (ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": "2m",
                "exp_samples": [{"labels": f'{{stack="{each}"}}', "value": 1} for each in stacks],
            }
            for alert, stacks in (("NoEngineReady", "ac"), ("Restarts", "bc"))
        ],
    }
    rules = {"rule_files": [str(OBSERVABILITY / "alerts.yml")], "evaluation_interval": "5s"}
    tests = tmp_path / "tests.json"
    tests.write_text(json.dumps(rules | {"tests": [case]}))
    subprocess.run(["promtool", "test", "rules", tests], check=True)


def test_every_query_of_dashboard_and_alerts(tmp_path: Path) -> None:
    # Debian's promtool does not know kubernetes_sd_configs.
    pods = yaml.safe_load((OBSERVABILITY / "prometheus-kubernetes.yml").read_text())
    del pods["scrape_configs"][0]["kubernetes_sd_configs"]
    (tmp_path / "pods.json").write_text(json.dumps(pods))  # which is YAML, too
    shutil.copy(OBSERVABILITY / "alerts.yml", tmp_path)
    for config in (OBSERVABILITY / "prometheus.yml", tmp_path / "pods.json"):
        subprocess.run(["promtool", "check", "config", config], check=True)
    with (
        running_stack(tp=2, frontends=2) as stack,
        running_prometheus(stack, tmp_path) as prometheus,
    ):
        stack.wait_serving()
        # Two frontends, a scheduler, two workers and the supervisor.
        prometheus.wait('count(up{job="nanovllm"} == 1) == 6')
        prometheus.wait("nanovllm:engine_ready == 1")
        with LLM(stack.address) as llm:
            structured = SamplingParams(
                max_tokens=16, structured_output=StructuredOutput(json_schema=SCHEMA)
            )
            llm.generate("What is 3 + 4?", structured)
            scheduler = stack.kill("scheduler")
            prompts = ["Once upon a time, " * 40] * 2
            llm.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
            stack.wait_replaced("scheduler", 0, scheduler)
            prometheus.wait('nanovllm:recovery_seconds_sum{lost="scheduler"} > 0')
            prometheus.wait("nanovllm:engine_ready == 1")
            worker = stack.kill("worker", 1)
            stack.wait_replaced("worker", 1, worker)
            llm.generate("What is 3 + 4?", structured)
            llm.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
        prometheus.wait('increase(nanovllm:restarts_total{instance="worker-1"}[5m]) > 0')
        prometheus.wait('increase(nanovllm:recovery_seconds_sum{lost="worker"}[5m]) > 0')
        for expression in expressions_of_dashboard():
            prometheus.wait(expression)
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert rules
        for rule in rules:
            assert rule["health"] == "ok", rule
            prometheus.ask("query", query=rule["query"])
