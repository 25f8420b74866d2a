"""A stack's actors and placement groups on a Ray cluster, as the launcher sees them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.errors import LaunchError
from deploy.health import UNREACHABLE
from deploy.native.status import ProcessStatus
from deploy.ray.actors import ANSWER_S, actor_names, ask
from deploy.ray.layout import RayStack
from deploy.ray.process import CALLS, ProcessActor
from deploy.stack import ENGINE_SERVICES, Process

_POLL_S = 0.2
_FORGET_S = 30.0
_FRONTENDS = "frontends"  # name of their placement group


@contextmanager
def connected(port: int) -> Iterator[Cluster]:
    """
    Raises:
        LaunchError: there is no cluster.
    """
    try:
        ray.init(
            "auto",  # or what RAY_ADDRESS says
            namespace=f"nano-vllm-grpc-{port}",
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(
            f"RUNTIME=ray: this host is not a node of a Ray cluster ({reason}); `ray start --head` "
            "starts a cluster, `ray start --address=HEAD:6379` joins one"
        ) from error
    try:
        yield Cluster()
    finally:
        ray.shutdown()


class Cluster:
    """The cluster that this process is connected to, in the namespace of one stack."""

    def nodes(self) -> list[str]:
        """The IP addresses of the nodes."""
        return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]

    def gpus(self) -> int:
        return int(ray.cluster_resources().get("GPU", 0))

    def names(self, service: str | None = None) -> list[str]:
        """The names of the processes of a service, or of all, in starting order."""
        services = [service] if service else ENGINE_SERVICES
        found = [name for name in actor_names() if _service(name) in services]
        return sorted(found, key=lambda name: (services.index(_service(name)), _index(name)))

    def engines(self) -> list[int]:
        return [_index(name) for name in self.names("scheduler")]

    def start_engine(self, stack: RayStack, index: int) -> None:
        """Starts an engine's processes, on one node if they fit, once there is room for all.

        Raises:
            ValueError: there is an engine with this index.
        """
        _start(stack, _engine(index), "PACK", stack.engine(index))

    def start_frontends(self, stack: RayStack, count: int) -> None:
        """Starts the frontends, on different nodes if there are enough.

        Raises:
            ValueError: there are frontends already.
        """
        _start(stack, _FRONTENDS, "SPREAD", stack.frontends(count))

    def stack(self) -> RayStack:
        """Returns the stack that runs, according to one of its processes.

        Raises:
            LaunchError: no process answers.
        """
        for stack in ask(self.names(), "stack").values():
            found: RayStack = stack
            return found
        raise LaunchError("RUNTIME=ray: no process of the stack answers")

    def statuses(self) -> list[ProcessStatus]:
        """Returns the state of each process: PENDING until Ray has placed it."""
        names = self.names()
        answers = ask(names, "status")
        return [answers.get(name) or _pending(name) for name in names]

    def stop_engine(self, stack: RayStack, index: int) -> None:
        """Retires an engine's scheduler, and stops the engine once no frontend uses it."""
        *ranks, scheduler = [each.name for each in stack.engine(index)]
        ask([scheduler], "retire")
        deadline = time.monotonic() + _FORGET_S
        while time.monotonic() < deadline:
            known = ask(self.names("frontend"), "peers")
            if not any(scheduler in peers for peers in known.values()):
                break
            time.sleep(_POLL_S)
        self.stop([scheduler], stack)
        self.stop(ranks, stack)
        _remove_group(_engine(index))

    def stop_all(self) -> int:
        """Stops the stack, clients before the servers that they call. Returns the number of
        processes."""
        names = self.names()
        if names:
            try:
                stack = self.stack()
            except LaunchError:
                stack = None
            groups = [_FRONTENDS, *map(_engine, self.engines())]
            for service in reversed(ENGINE_SERVICES):
                self.stop(self.names(service), stack)
            for name in groups:
                _remove_group(name)
        return len(names)

    def stop(self, names: Sequence[str], stack: RayStack | None) -> None:
        """Stops processes at the same time, and kills those that do not answer."""
        if stack:
            ask(names, "stop", timeout_s=stack.settings.drain_timeout_s + 2 * ANSWER_S)
        for name in names:
            try:
                ray.kill(ray.get_actor(name), no_restart=True)
            except (ValueError, RayError):
                continue


def _start(stack: RayStack, group_name: str, placement: str, processes: Sequence[Process]) -> None:
    """Reserves all resources of the processes, or none, and starts an actor for each."""
    bundles = [dict(stack.resources(each)) for each in processes]
    group = placement_group(bundles, strategy=placement, name=group_name, lifetime="detached")
    for bundle, process in enumerate(processes):
        resources = bundles[bundle]
        options = {
            "name": process.name,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": CALLS,
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        }
        ray.remote(ProcessActor).options(**options).remote(stack, process)


def _pending(name: str) -> ProcessStatus:
    process = Process(_service(name), _index(name))
    return ProcessStatus(process, None, "PENDING", UNREACHABLE, None, node="-")


def _service(name: str) -> str:
    return name.rpartition("-")[0]


def _index(name: str) -> int:
    return int(name.rpartition("-")[2])


def _engine(index: int) -> str:
    return f"engine-{index}"


def _remove_group(name: str) -> None:
    try:
        group: PlacementGroup = get_placement_group(name)
    except ValueError:
        return
    remove_placement_group(group)
