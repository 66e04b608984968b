"""The manifests for Kubernetes: each is of a valid form, and what they say of each other and of the pool is true."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import ValidationError
from ray._private.ray_constants import RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S

from coordinator.base.config import CoordinatorConfig
from coordinator.server import DOOR_GRACE_S
from tests.support.deploy import ray_cluster
from tests.support.deploy.commands import expanded, ray_start_fault, serve_fault
from tests.support.deploy.files import (
    BASE,
    COMPONENTS,
    KUBERNETES,
    OVERLAYS,
    ROOT,
    containers,
    documents,
    kustomization,
    missing,
    only,
    patched,
    patched_cluster,
    pod_templates,
    resources,
    unmatched,
)
from tinkerpool.credentials import DEFAULT_PORT
from workers.contract.settings import PoolConfig, PoolModel

KUBERNETES_VERSION = "1.33"
KUBECTL = shutil.which("kubectl")
NAMESPACE, JOB, MAINTENANCE = (
    documents(KUBERNETES / f"{name}.yaml")[0] for name in ("namespace", "fetch-model", "maintenance")
)
MANIFESTS = [*resources(BASE), NAMESPACE, JOB, MAINTENANCE]
CLUSTER, COORDINATOR = only("RayCluster", MANIFESTS), only("StatefulSet", MANIFESTS)
CONTAINER = COORDINATOR["spec"]["template"]["spec"]["containers"][0]
RAYLET = COORDINATOR["spec"]["template"]["spec"]["initContainers"][0]


def form_faults(manifest: dict[str, Any]) -> list[str]:
    """Return where a manifest differs from the schema of its kind, unknown fields included."""
    if manifest["kind"] == "RayCluster":
        pods = [
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of-ray"}, "spec": template["spec"]}
            for template in pod_templates(manifest).values()
        ]
        return [*ray_cluster.faults(manifest), *(fault for pod in pods for fault in form_faults(pod))]
    try:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    except ValidationError as error:
        return [f"{manifest['kind']} {'.'.join(map(str, error.path))}: {error.message}"]
    return []


def name_of(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}-{manifest['metadata'].get('name', 'generated')}"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=name_of)
def test_a_manifest_has_the_fields_of_its_kind_and_no_other(manifest: dict[str, Any]) -> None:
    assert form_faults(manifest) == []


def spoil_service(manifest: dict[str, Any]) -> None:
    manifest["spec"]["publishNotReadyAdresses"] = True


def spoil_coordinator(manifest: dict[str, Any]) -> None:
    manifest["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["httpGet"]["schema"] = "HTTPS"


def spoil_policy(manifest: dict[str, Any]) -> None:
    manifest["spec"]["policyTypes"] = "Ingress"


def spoil_token(manifest: dict[str, Any]) -> None:
    manifest["spec"]["authOptions"]["mode"] = "tokens"


def spoil_version(manifest: dict[str, Any]) -> None:
    manifest["spec"]["rayVersion"] = "2.56.0"


def spoil_head(manifest: dict[str, Any]) -> None:
    manifest["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def spoil_backend(manifest: dict[str, Any]) -> None:
    manifest["spec"]["gcsFaultToleranceOptions"]["redisAddress"] = "redis:6379"


def spoil_replicas(manifest: dict[str, Any]) -> None:
    manifest["spec"]["workerGroupSpecs"][0]["maxReplicas"] = 0


def spoil_groups(manifest: dict[str, Any]) -> None:
    manifest["spec"]["workerGroupSpecs"] *= 2


def spoil_restarts(manifest: dict[str, Any]) -> None:
    manifest["spec"]["workerGroupSpecs"][0]["template"]["spec"]["restartPolicy"] = "Always"


def spoil_mounts(manifest: dict[str, Any]) -> None:
    head = manifest["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    head["env"] = [{"name": "RAY_gcs_storage", "value": "rocksdb"}]


def spoil_pod(manifest: dict[str, Any]) -> None:
    manifest["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["resource"] = {}


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("Service", spoil_service),
        ("StatefulSet", spoil_coordinator),
        ("NetworkPolicy", spoil_policy),
        ("RayCluster", spoil_token),
        ("RayCluster", spoil_version),
        ("RayCluster", spoil_head),
        ("RayCluster", spoil_backend),
        ("RayCluster", spoil_replicas),
        ("RayCluster", spoil_groups),
        ("RayCluster", spoil_restarts),
        ("RayCluster", spoil_mounts),
        ("RayCluster", spoil_pod),
    ],
)
def test_a_broken_manifest_is_found(kind: str, spoil: Callable[[dict[str, Any]], None]) -> None:
    manifest = copy.deepcopy(next(each for each in MANIFESTS if each["kind"] == kind))
    assert form_faults(manifest) == []
    spoil(manifest)
    assert len(form_faults(manifest)) == 1


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS, *COMPONENTS], ids=lambda folder: folder.name)
def test_a_kustomization_names_files_that_exist_and_patches_objects_that_are_there(folder: Path) -> None:
    assert missing(folder) == []
    assert unmatched(folder, resources(BASE)) == []
    pods = [template for manifest in resources(BASE) for template in pod_templates(manifest).values()]
    replaced = {image["name"] for image in kustomization(folder).get("images", ())}
    assert replaced <= {container["image"] for pod in pods for container in containers(pod)}
    assert set(kustomization(folder)) <= {
        *("apiVersion", "kind", "namespace", "resources", "images", "patches", "components")
    }


def test_a_kustomization_of_what_is_not_there_is_found(tmp_path: Path) -> None:
    merge = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "tinkerpool"}}
    template = {"spec": {"template": {"spec": {"containers": [{"name": "coordinater", "env": []}]}}}}
    target = {"kind": "RayCluster", "name": "tinkerpool"}
    patches: list[Any] = [
        {"patch": yaml.safe_dump(merge | {"metadata": {"name": "tinker"}})},
        {"patch": yaml.safe_dump(merge | template)},
        {"patch": yaml.safe_dump(merge | {"spec": {"replicas": "1"}})},
        {"target": target, "patch": "[{op: replace, path: /spec/workerGroupSpecs/1/replicas, value: 1}]"},
        {"target": target, "patch": "[{op: remove, path: /spec/suspended}]"},
        {"target": target | {"name": "ray"}, "patch": "[]"},
    ]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": ["gone.yaml"], "patches": patches}))
    assert missing(tmp_path) == ["gone.yaml"]
    assert len(unmatched(tmp_path, resources(BASE))) == len(patches)


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_kustomize_renders_an_overlay_into_valid_manifests(folder: Path) -> None:
    if KUBECTL is None:
        pytest.skip("needs kubectl, which renders without a cluster")
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rendered: list[dict[str, Any]] = list(yaml.safe_load_all(done.stdout))
    assert [fault for manifest in rendered for fault in form_faults(manifest)] == []
    [image] = kustomization(folder)["images"]
    pods = [template for manifest in rendered for template in pod_templates(manifest).values()]
    assert {each["image"] for pod in pods for each in containers(pod)} == {f"{image['newName']}:{image['newTag']}"}
    assert {each["metadata"].get("namespace") for each in rendered} == {kustomization(BASE)["namespace"]}
    cluster = patched_cluster(folder)
    cluster["metadata"]["namespace"] = kustomization(BASE)["namespace"]
    for template in pod_templates(cluster).values():
        for container in containers(template):
            container["image"] = f"{image['newName']}:{image['newTag']}"
    assert only("RayCluster", rendered) == cluster
    assert serve_fault(serve_arguments(only("StatefulSet", rendered))) == ""


def test_a_component_renders_into_a_valid_cluster() -> None:
    for folder in COMPONENTS:
        [patch] = kustomization(folder)["patches"]
        assert form_faults(patched(CLUSTER, yaml.safe_load(patch["patch"]))) == []


def serve_arguments(coordinator: dict[str, Any]) -> list[str]:
    """Return the arguments of `tinkerpool serve` in a StatefulSet."""
    container = coordinator["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    return [expanded(each, variables) for each in container["args"]]


def test_the_commands_in_the_manifests_are_ones_that_exist() -> None:
    assert "command" not in CONTAINER, "the image's entry point is tinkerpool serve"
    assert serve_fault(serve_arguments(COORDINATOR)) == ""
    assert RAYLET["command"][:2] == ["ray", "start"]
    assert ray_start_fault([*RAYLET["command"][2:], *RAYLET["args"]]) == ""
    groups = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]]
    for group in groups:
        assert ray_start_fault([f"--{name}={value}" for name, value in group["rayStartParams"].items()]) == ""
    assert "hf" in JOB["spec"]["template"]["spec"]["containers"][0]["command"]


@pytest.mark.parametrize("arguments", [["--worker=1"], ["--num-cpus=none"], ["--gpus"], ["extra"]])
def test_a_command_that_does_not_exist_is_found(arguments: list[str]) -> None:
    assert serve_fault(arguments)
    assert ray_start_fault(["--head", *arguments])


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_an_overlays_cluster_is_valid_and_has_room_for_its_workers(folder: Path) -> None:
    cluster = patched_cluster(folder)
    assert form_faults(cluster) == []
    environment = {each["name"]: each.get("value", "") for each in CONTAINER["env"]}
    for patch in kustomization(folder)["patches"]:
        body = yaml.safe_load(patch["patch"])
        if "target" not in patch and body["kind"] == "StatefulSet":
            for container in body["spec"]["template"]["spec"].get("containers", ()):
                environment |= {each["name"]: each["value"] for each in container["env"]}
    groups = cluster["spec"]["workerGroupSpecs"]
    assert int(environment["WORKERS"]) <= sum(group["maxReplicas"] for group in groups)
    for group in groups:
        [container] = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert limits.get("nvidia.com/gpu", "0") == environment["GPUS"]
        assert int(limits["cpu"]) == int(environment["CPUS"]), "a host has one worker"


def test_no_worker_runs_on_the_head_or_beside_the_coordinator() -> None:
    head = CLUSTER["spec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"
    assert {"--num-cpus=0", "--num-gpus=0"} <= set(RAYLET["args"])
    assert not any("nvidia.com/gpu" in each["resources"]["limits"] for each in containers(head["template"]))
    address = next(each for each in CONTAINER["args"] if each.startswith("--ray-address="))
    assert address.removeprefix("--ray-") in [each.removeprefix("--") for each in RAYLET["args"]]
    assert address == f"--ray-address={CLUSTER['metadata']['name']}-head-svc:6379"


def test_the_clusters_ray_is_the_locked_one() -> None:
    [version] = re.findall(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert CLUSTER["spec"]["rayVersion"] == version


def test_all_of_ray_has_the_token_of_one_secret() -> None:
    auth = CLUSTER["spec"]["authOptions"]
    assert auth["mode"] == "token"
    for container in (CONTAINER, RAYLET):
        environment = {each["name"]: each for each in container["env"]}
        assert environment["RAY_AUTH_MODE"]["value"] == "token"
        reference = environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": auth["secretName"], "key": "auth_token"}  # KubeRay's key


def test_a_lost_head_is_waited_for_by_the_coordinator_as_by_kuberays_workers() -> None:
    assert CLUSTER["spec"]["gcsFaultToleranceOptions"]
    for container in (CONTAINER, RAYLET):
        waits = {each["name"]: each.get("value") for each in container["env"]}
        assert waits["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"


def test_one_coordinator_has_a_volume_of_its_own() -> None:
    spec = COORDINATOR["spec"]
    assert spec["replicas"] == 1
    [claim] = spec["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}


def seconds_of(probe: dict[str, Any]) -> float:
    """Return how long a probe may fail."""
    return float(probe["periodSeconds"] * probe["failureThreshold"])


def test_liveness_needs_no_worker_and_the_start_may_take_as_long_as_it_is_given() -> None:
    probes = {name: CONTAINER[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    asked = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert asked == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    assert {(probe["httpGet"]["scheme"], probe["httpGet"]["port"]) for probe in probes.values()} == {("HTTPS", "https")}
    ports = {each["name"]: each["containerPort"] for each in CONTAINER["ports"]}
    assert ports == {"grpc": DEFAULT_PORT, "https": DEFAULT_PORT + 1, "metrics": DEFAULT_PORT + 2}
    start_timeout_s = PoolConfig(models=(PoolModel(name="m", path="m"),)).start_timeout_s
    assert seconds_of(probes["startup"]) >= 1.5 * start_timeout_s
    assert seconds_of(probes["liveness"]) >= 60, "a busy machine is no dead process"
    assert only("Service", MANIFESTS)["spec"]["publishNotReadyAddresses"]


def test_a_stop_has_time_for_a_cycle_and_for_what_is_written_at_the_end() -> None:
    config = CoordinatorConfig(data_dir=Path())
    grace_s = COORDINATOR["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= 4 * (config.stop_s_max + DOOR_GRACE_S + config.cycle_s_max)


def test_a_workers_host_has_time_to_hand_its_adapters_over_when_its_pod_ends() -> None:
    for group in CLUSTER["spec"]["workerGroupSpecs"]:
        [container] = group["template"]["spec"]["containers"]
        waits = {each["name"]: each["value"] for each in container["env"]}
        drain_s = float(waits["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert drain_s > RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, "Ray knows the variable; its default is short"
        assert drain_s + 10 <= group["template"]["spec"]["terminationGracePeriodSeconds"]


def test_the_namespace_and_with_it_the_coordinators_volume_survive_a_deletion_of_any_overlay() -> None:
    assert all(each["kind"] != "Namespace" for folder in (BASE, *OVERLAYS) for each in resources(folder))
    assert NAMESPACE["metadata"]["name"] == kustomization(BASE)["namespace"] == JOB["metadata"]["namespace"]
    assert MAINTENANCE["metadata"]["namespace"] == NAMESPACE["metadata"]["name"]


def test_a_single_node_with_a_taint_for_its_gpu_takes_every_pod() -> None:
    folder = KUBERNETES / "overlays" / "one-gpu-node"
    [patch] = [
        body
        for body in (yaml.safe_load(each["patch"]) for each in kustomization(folder)["patches"])
        if isinstance(body, dict) and body["kind"] == "StatefulSet"
    ]
    cluster = pod_templates(patched_cluster(folder)).values()
    pods = [*cluster, patch["spec"]["template"], *pod_templates(JOB).values(), *pod_templates(MAINTENANCE).values()]
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert all(taint in pod["spec"]["tolerations"] for pod in pods)


def test_pods_apart_from_the_overlays_have_the_image_and_the_volumes_of_those_for_gpus() -> None:
    images = {
        f"{each['newName']}:{each['newTag']}"
        for folder in OVERLAYS
        for each in kustomization(folder)["images"]
        if each["newTag"] != "cpu"
    }
    apart = [*pod_templates(JOB).values(), *pod_templates(MAINTENANCE).values()]
    assert {each["image"] for pod in apart for each in containers(pod)} == images
    [claim] = COORDINATOR["spec"]["volumeClaimTemplates"]
    [volume] = MAINTENANCE["spec"]["volumes"]
    name = f"{claim['metadata']['name']}-{COORDINATOR['metadata']['name']}-0"
    assert volume["persistentVolumeClaim"]["claimName"] == name
    own = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    [mount] = MAINTENANCE["spec"]["containers"][0]["volumeMounts"]
    assert mount["mountPath"] == own[claim["metadata"]["name"]]


@pytest.mark.parametrize("manifest", [CLUSTER, COORDINATOR, JOB, MAINTENANCE], ids=name_of)
def test_every_pod_runs_as_the_images_user_without_rights(manifest: dict[str, Any]) -> None:
    image = (ROOT / "scripts/deploy/Containerfile").read_text(encoding="utf-8")
    [user] = re.findall(r"^USER (\d+):\d+$", image, re.MULTILINE)
    for template in pod_templates(manifest).values():
        pod = template["spec"]["securityContext"]
        assert (pod["runAsNonRoot"], str(pod["runAsUser"]), str(pod["fsGroup"])) == (True, user, user)
        for container in containers(template):
            own = container["securityContext"]
            assert (own["allowPrivilegeEscalation"], own["capabilities"]) == (False, {"drop": ["ALL"]})


@pytest.mark.parametrize("manifest", [CLUSTER, COORDINATOR, JOB], ids=name_of)
def test_every_mount_has_its_volume_and_every_claim_exists(manifest: dict[str, Any]) -> None:
    claims = {each["metadata"]["name"] for each in MANIFESTS if each["kind"] == "PersistentVolumeClaim"}
    for template in pod_templates(manifest).values():
        volumes = {each["name"]: each for each in template["spec"].get("volumes", ())}
        volumes |= {each["metadata"]["name"]: each for each in manifest["spec"].get("volumeClaimTemplates", ())}
        mounts = [mount["name"] for container in containers(template) for mount in container.get("volumeMounts", ())]
        assert set(mounts) == set(volumes)
        claimed = [each["persistentVolumeClaim"] for each in volumes.values() if "persistentVolumeClaim" in each]
        assert {each["claimName"] for each in claimed} <= claims
        for container in containers(template):
            mounted = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
            files = [each.partition("=")[2] for each in container.get("args", ()) if each.startswith("--tls-")]
            assert all(any(file.startswith(f"{path}/") for path in mounted) for file in files)


def labels_of_pods() -> list[dict[str, str]]:
    """Return the labels of every pod, with those that KubeRay adds."""
    name = CLUSTER["metadata"]["name"]
    own = [template["metadata"]["labels"] for template in pod_templates(COORDINATOR).values()]
    rays = [
        template["metadata"]["labels"] | {"ray.io/cluster": name, "ray.io/node-type": kind.split()[0].rstrip("s")}
        for kind, template in pod_templates(CLUSTER).items()
    ]
    return [*own, *rays]


def selectors(value: Any) -> list[dict[str, str]]:
    """Return every `matchLabels`, and the selector of a service, in a manifest."""
    found = []
    if isinstance(value, dict):
        found = [value["matchLabels"]] if "matchLabels" in value else []
        if value.get("kind") == "Service":
            found.append(value["spec"]["selector"])
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return found + [each for child in children for each in selectors(child)]


def test_every_selector_selects_a_pod() -> None:
    found = [selector for manifest in MANIFESTS for selector in selectors(manifest)]
    assert len(found) == 10
    found.remove({"kubernetes.io/metadata.name": "monitoring"})  # of a namespace, which has it from Kubernetes
    for selector in found:
        assert any(selector.items() <= labels.items() for labels in labels_of_pods()), selector


def test_named_ports_exist() -> None:
    ports = {each["name"] for each in CONTAINER["ports"]}
    service = {each["targetPort"] for each in only("Service", MANIFESTS)["spec"]["ports"]}
    [doors] = [each for each in MANIFESTS if each["metadata"].get("name") == "tinkerpool-doors"]
    doors_of = {"from" in rule: {port["port"] for port in rule["ports"]} for rule in doors["spec"]["ingress"]}
    assert doors_of == {False: service, True: {"metrics"}}, "metrics are for some pods alone"
    assert ports == service | {"metrics"}
    assert "--metrics-host=0.0.0.0" in CONTAINER["args"]


def test_only_the_pools_own_pods_reach_ray() -> None:
    policies = [each for each in MANIFESTS if each["kind"] == "NetworkPolicy"]
    [ray] = [each for each in policies if each["metadata"]["name"] == "tinkerpool-ray"]
    own = {"matchLabels": {"app.kubernetes.io/part-of": "tinkerpool"}}
    assert ray["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }
    assert all(own["matchLabels"].items() <= labels.items() for labels in labels_of_pods())
