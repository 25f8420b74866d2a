"""The page of Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

from deploy.native.supervisor import SupervisorMetrics
from frontend.callers.call import Call, Work
from frontend.metrics import RequestMetrics
from scheduler_svc.core.admission import Limits
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.metrics import EngineMetrics
from shared.paging import Paging
from shared.telemetry.metrics import ServiceMetrics
from tools.reference import markdown
from tools.reference.markdown import code, codes, described, number, prose
from worker_svc.metrics import WorkerMetrics

_MODEL, _BUCKET = "model_name", "le"  # labels of all metrics, and of histograms
_COLUMNS = "Metric", "Type", "Labels", "Meaning"


def page() -> str:
    collected = {service: [*metrics.collect()] for service, metrics in _services().items()}
    own = {service: [*metrics.families()] for service, metrics in _services().items()}
    own_names = {each.name for families in own.values() for each in families}
    common = {each.name: each for each in collected["Workers"] if each.name not in own_names}
    return markdown.page(
        "Metrics",
        "This page lists the Prometheus metrics of each process, with their types and labels.",
        f"Every metric has the label {code(_MODEL)}, which is empty for the supervisor. Prometheus "
        "adds `service` and `index` from the files of `.run/PORT/metrics`, and `engine` for "
        "schedulers and workers. Times are in seconds. Metrics that vLLM also has use the same "
        "name with another prefix, and the same buckets.",
        "Each process also serves the `process_*` metrics of prometheus_client.",
        "## All processes",
        described(_COLUMNS, map(_row, common.values())),
        *_sections(own),
        "## Buckets",
        "These are the upper bounds of the buckets of histograms.",
        "\n".join(_buckets(own)),
    )


def _services() -> Mapping[str, ServiceMetrics]:
    """The metrics of each service, which have counted something for every label."""
    requests = RequestMetrics()
    call, work = Call("Generate", "unix:"), Work("", "", 1, 1, 1, "stop")
    requests.usage.add(call, "stop", "", work)
    requests.usage.add(call, "RESOURCE_EXHAUSTED", "max_requests", None)
    engine = EngineMetrics()
    engine.scheduler = Scheduler(Limits(1, 1, 1, 1, 1), BlockManager(1, Paging(1)))
    return {
        "Frontends": requests,
        "Schedulers": engine,
        "Workers": WorkerMetrics(),
        "Supervisor": SupervisorMetrics(lambda: {"worker-0": 1}),
    }


def _sections(own: Mapping[str, list[Metric]]) -> Iterator[str]:
    for service, families in own.items():
        yield f"## {service}"
        yield described(_COLUMNS, map(_row, families))


def _row(family: Metric) -> tuple[str, ...]:
    labels = [name for name in family.samples[0].labels if name not in (_MODEL, _BUCKET)]
    return code(_name(family)), family.type, codes(labels) or "none", prose(family.documentation)


def _name(family: Metric) -> str:
    """The name in queries, which for a counter ends in `_total`."""
    return family.samples[0].name if family.type == "counter" else family.name


def _buckets(own: Mapping[str, list[Metric]]) -> Iterator[str]:
    """Yields a line for the histograms that have the same buckets."""
    names: dict[tuple[str, ...], list[str]] = {}
    for families in own.values():
        for family in families:
            buckets = [each.labels[_BUCKET] for each in family.samples if _BUCKET in each.labels]
            if bounds := tuple(number(float(each)) for each in buckets[:-1]):  # without +Inf
                names.setdefault(bounds, []).append(family.name)
    for bounds, found in names.items():
        yield f"- {codes(dict.fromkeys(found))}: {', '.join(bounds)}"
