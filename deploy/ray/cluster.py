"""A stack's actors and placement groups on a Ray cluster, as the launcher sees them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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
from deploy.ray.layout import Member, RayStack, service_resources
from deploy.ray.process import CALLS, ProcessActor, Report
from deploy.stack import ENGINE_SERVICES, Process

_ANSWER_S = 5.0
_POLL_S = 0.2
_FORGET_S = 30.0
_FRONTENDS = "frontends"  # name of their placement group
_ORDER = {service: order for order, service in enumerate(ENGINE_SERVICES)}


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

    def members(self) -> list[Member]:
        """The processes of the stack, in starting order."""
        named = map(Member.named, ray.util.list_named_actors())
        return sorted(named, key=lambda each: (_ORDER[each.service], each.index))

    def engines(self) -> list[int]:
        return [each.index for each in self.members() if each.service == "scheduler"]

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
        members = (Member("frontend", index) for index in range(count))
        _start(stack, _FRONTENDS, "SPREAD", [(each, service_resources()) for each in members])

    def stack(self) -> RayStack:
        """Returns the stack that runs, according to one of its processes.

        Raises:
            LaunchError: no process answers.
        """
        for _, stack in self.ask(self.members(), "stack"):
            if stack is not None:
                found: RayStack = stack
                return found
        raise LaunchError("RUNTIME=ray: no process of the stack answers")

    def reports(self, members: Sequence[Member]) -> list[Report]:
        """Returns a report per member; PENDING until Ray has placed it, or placed it again."""
        return [report or _pending(member) for member, report in self.ask(members, "report")]

    def ask(
        self,
        members: Iterable[Member],
        method: str,
        *arguments: object,
        timeout_s: float = _ANSWER_S,
    ) -> list[tuple[Member, Any]]:
        """Calls `method` of all members' actors at once; returns the answers, or None for each."""
        questions = []
        for member in members:
            try:
                actor = ray.get_actor(member.name)
                questions.append((member, getattr(actor, method).remote(*arguments)))
            except (ValueError, RayError):  # the actor has ended
                questions.append((member, None))
        asked = [question for _, question in questions if question is not None]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
        return [(member, _answer(question)) for member, question in questions]

    def stop_engine(self, stack: RayStack, index: int) -> None:
        """Retires an engine's scheduler, and stops the engine once no frontend uses it."""
        members = [member for member, _ in stack.engine(index)]
        scheduler = members[-1]
        self.ask([scheduler], "retire")
        frontends = [each for each in self.members() if each.service == "frontend"]
        deadline = time.monotonic() + _FORGET_S
        while time.monotonic() < deadline:
            known = self.ask(frontends, "peers")
            if not any(peers and scheduler.name in peers for _, peers in known):
                break
            time.sleep(_POLL_S)
        self.stop([scheduler], stack)
        self.stop(members[:-1], stack)
        _remove_group(_engine(index))

    def stop_all(self) -> int:
        """Stops the stack, clients before the servers that they call. Returns the number of
        processes."""
        members = self.members()
        if members:
            try:
                stack = self.stack()
            except LaunchError:
                stack = None
            groups = [_FRONTENDS, *map(_engine, self.engines())]
            for service in reversed(ENGINE_SERVICES):
                self.stop([each for each in members if each.service == service], stack)
            for name in groups:
                _remove_group(name)
        return len(members)

    def stop(self, members: Sequence[Member], stack: RayStack | None) -> None:
        """Stops processes at the same time, and kills those that do not answer."""
        if stack:
            self.ask(members, "stop", timeout_s=stack.settings.drain_timeout_s + 2 * _ANSWER_S)
        for member in members:
            try:
                ray.kill(ray.get_actor(member.name), no_restart=True)
            except (ValueError, RayError):
                continue


def _start(
    stack: RayStack,
    group_name: str,
    placement: str,
    processes: Sequence[tuple[Member, Mapping[str, float]]],
) -> None:
    """Reserves all resources of the processes, or none, and starts an actor for each."""
    bundles = [dict(resources) for _, resources in processes]
    group = placement_group(bundles, strategy=placement, name=group_name, lifetime="detached")
    for bundle, (member, resources) in enumerate(processes):
        options = {
            "name": member.name,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": CALLS,
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        }
        ray.remote(ProcessActor).options(**options).remote(stack, member)


def _answer(question: Any) -> Any:
    if question is None:
        return None
    try:
        return ray.get(question, timeout=0)
    except RayError:
        return None


def _pending(member: Member) -> Report:
    process = Process(member.service, member.index, "-")
    return Report(ProcessStatus(process, None, "PENDING", UNREACHABLE, None), "-")


def _engine(index: int) -> str:
    return f"engine-{index}"


def _remove_group(name: str) -> None:
    try:
        group: PlacementGroup = get_placement_group(name)
    except ValueError:
        return
    remove_placement_group(group)
