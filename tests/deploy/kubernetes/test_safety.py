"""Nothing that the manifests run could do more than it needs, and nothing goes over the network in
plaintext or to the wrong pod."""

from __future__ import annotations

from frontend.settings import FrontendSettings
from nano_vllm_grpc.channels import stays_on_host
from scheduler_svc.settings import SchedulerSettings
from tests.deploy.kubernetes.pods import Process, named, pods
from tests.deploy.kubernetes.rendering import KUBERNETES, Manifest, render, render_combination

from .conftest import Combination


def test_pods_are_without_privileges(manifests: list[Manifest]) -> None:
    for pod in pods(manifests):
        assert pod.spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        common = pod.spec["securityContext"]
        assert common["runAsNonRoot"] is True
        assert common["runAsUser"] == common["fsGroup"] == 10001  # the images' user
        assert common["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in pod.spec["volumes"]:
            assert not {"hostPath"} & volume.keys()
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]
            # Group-readable, and no more.
            assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440
        for container in pod.containers:
            own = container["securityContext"]
            if container["name"] == "frontend":
                assert container["resources"]["limits"]["memory"] == "8Gi"
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
            assert "/tmp" in mounts
            assert mounts["/models"]["readOnly"] is True


def test_pods_of_a_service_are_spread(manifests: list[Manifest]) -> None:
    for pod in pods(manifests):
        assert "podAntiAffinity" in pod.spec.get("affinity", {}) or (
            pod.spec["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
        )


def test_evictions_leave_some_pods_of_each_service(manifests: list[Manifest]) -> None:
    selectors = [
        budget["spec"]["selector"]["matchLabels"]
        for budget in named(manifests, "PodDisruptionBudget").values()
    ]
    for pod in pods(manifests):
        assert sum(pod.selected_by(selector) for selector in selectors) == 1, pod.name


def test_traffic_between_pods_is_encrypted(
    started: list[Process], combination: Combination
) -> None:
    encrypted = "encrypted-network" in combination[1]
    for process in started:
        if not all(map(stays_on_host, process.served)):
            assert (process.tls is None) is encrypted
        assert process.settings.allow_plaintext is encrypted
        expected = "optional" if encrypted else "required"
        assert process.settings.internal_tls_roles == expected


def test_services_say_whether_http_is_encrypted(
    manifests: list[Manifest], combination: Combination
) -> None:
    ports = named(manifests, "Service")["frontend"]["spec"]["ports"]
    (http,) = (each for each in ports if each["name"] == "http")
    assert http["appProtocol"] == ("http" if "encrypted-network" in combination[1] else "https")


def test_clients_need_a_token(started: list[Process]) -> None:
    for process in started:
        if process.service is FrontendSettings:
            assert process.settings.callers_need_tokens


def test_pods_reject_traffic_without_a_policy(manifests: list[Manifest]) -> None:
    closed = named(manifests, "NetworkPolicy")["default"]["spec"]
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & closed.keys()
    assert all(pod.selected_by(closed["podSelector"]["matchLabels"]) for pod in pods(manifests))


def test_ranks_end_after_their_scheduler(started: list[Process]) -> None:
    """As sidecars do."""
    for process in started:
        if process.service is not SchedulerSettings:
            continue
        ranks = [each for each in process.pod.containers if each["name"].startswith("worker")]
        assert ranks
        assert all(rank["restartPolicy"] == "Always" for rank in ranks)


def test_the_pod_for_copying_is_without_privileges() -> None:
    (pod,) = named(render(KUBERNETES / "model"), "Pod").values()
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True


def test_the_namespace_refuses_privileges() -> None:
    (namespace,) = named(render_combination("cpu"), "Namespace").values()
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
