"""The Helm chart: rendered for the value sets of its `ci/` folder, without a cluster.

What Kubernetes would refuse is found by its schemas, what the server would refuse by its own
parser of flags, and what selects nothing by comparing labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.settings import Settings, parse

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed"
)

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "mlx-lm-server"
SETS = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))
VERSIONS = ("1.29", "1.34")
WORKLOADS = ("StatefulSet", "DaemonSet", "Deployment")
COMPONENT = "app.kubernetes.io/component"
Objects = list[dict[str, Any]]


def values_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text())
    return found


def render(values: Mapping[str, Any]) -> Objects:
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values=dict(values), name="llm", namespace="serving").values()
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


@pytest.fixture(scope="module")
def rendered() -> dict[str, Objects]:
    return {name: render(values_of(name)) for name in SETS}


@pytest.fixture(params=SETS)
def objects(rendered: dict[str, Objects], request: pytest.FixtureRequest) -> Objects:
    """The objects of each value set in turn."""
    return rendered[request.param]


def pick(objects: Objects, kind: str) -> Objects:
    return [one for one in objects if one["kind"] == kind]


def named(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in pick(objects, kind) if one["metadata"]["name"] == name]
    return found


def workloads(objects: Objects) -> Objects:
    return [one for kind in WORKLOADS for one in pick(objects, kind)]


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(found)


def labels_of(workload: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def engines_of(objects: Objects) -> Objects:
    return [one for one in pick(objects, "StatefulSet") if labels_of(one)[COMPONENT] == "engine"]


def settings_of(workload: dict[str, Any]) -> Settings:
    """Return what the container's process would run with, its image's variables included."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    environment = dict(re.findall(r"(MLX_LM_SERVER_\w+)=(\S+)", dockerfile))
    container = container_of(workload)
    for each in container.get("env", ()):
        environment[each["name"]] = each.get("value", "")
    # The parser looks for the file of keys, which is there in the pod only.
    arguments = [each.replace("=/api-keys/keys", f"={__file__}") for each in container["args"]]
    return parse(arguments, environment, "chart")


def test_five_value_sets_are_tried() -> None:
    assert SETS == ["gpu", "minimal", "node-store", "secured", "two-models"]


def test_kubernetes_takes_all_objects(objects: Objects) -> None:
    kinds = {one["kind"] for one in objects}
    wanted = {"StatefulSet", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    assert wanted <= kinds
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))
    for one in objects:
        if one["kind"] != "ServiceMonitor":  # not Kubernetes' own, and has no schema here
            for version in VERSIONS:
                kubernetes_validate.validate(one, version, strict=True)


def test_the_schemas_find_mistakes() -> None:
    (policy, *_) = pick(render(values_of("minimal")), "NetworkPolicy")
    policy["spec"]["podSelectors"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(policy, VERSIONS[0], strict=True)


def test_a_model_may_have_no_replica() -> None:
    models = [
        {"name": "off", "model": "a/b", "replicas": 0},
        {"name": "usual", "model": "a/c"},
        {"name": "unset", "model": "a/d", "replicas": None},
    ]
    found = engines_of(render({**values_of("minimal"), "models": models}))
    assert [one["spec"]["replicas"] for one in found] == [0, 1, 1]


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ([{"name": "Qwen3.5", "model": "a/b"}], "the name Qwen3.5 has other characters than"),
        ([{"model": "a/b"}], "the name <nil> has other characters than"),
        ([{"name": "small"}], "small has no model"),
        (2 * [{"name": "small", "model": "a/b"}], "two have the name small"),
    ],
)
def test_models_that_cannot_be_installed_are_refused_by_name(
    models: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(Exception, match=f"models: {reason}"):
        render({**values_of("minimal"), "models": models})


def test_the_server_takes_all_flags(objects: Objects, capsys: pytest.CaptureFixture[str]) -> None:
    for workload in workloads(objects):
        settings = settings_of(workload)
        assert settings.curve_dir == Path("/curve")
        grace_s = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        is_kvstore = workload["kind"] == "DaemonSet"
        stop_s = 10 if is_kvstore else settings.drain_timeout_s + settings.pre_stop_delay_s
        assert grace_s > stop_s + 15
    assert capsys.readouterr().err == ""  # no warning of variables that are no settings


@pytest.mark.parametrize("name", SETS)
def test_engines_join_every_router(rendered: dict[str, Objects], name: str) -> None:
    objects = rendered[name]
    router = named(objects, "Deployment", "llm-mlx-lm-server-router")
    service = named(objects, "Service", "llm-mlx-lm-server-router-engines")["spec"]
    assert service["publishNotReadyAddresses"] is True and service["clusterIP"] == "None"
    assert service["selector"].items() <= labels_of(router).items()
    assert settings_of(router).engine_socket == ("tcp://0.0.0.0:5555",)
    engines = engines_of(objects)
    models = values_of(name).get("models", [{"name": "demo", "model": "demo"}])
    assert len(engines) == len(models)
    for engine, model in zip(engines, models, strict=True):
        settings = settings_of(engine)
        assert settings.engine_socket == ("dns+tcp://llm-mlx-lm-server-router-engines:5555",)
        assert settings.model == model["model"]
        assert settings.served_model_name[0] == model["name"]


def test_selectors_select_pods_of_the_release(objects: Objects) -> None:
    pods = list(map(labels_of, workloads(objects)))
    for selector in selectors(objects):
        chosen = [labels for labels in pods if selector.items() <= labels.items()]
        assert chosen, selector
        assert len({labels[COMPONENT] for labels in chosen}) == 1, selector


def selectors(objects: Objects) -> Iterator[dict[str, str]]:
    for one in objects:
        spec = one.get("spec", {})
        if one["kind"] == "Service":
            yield spec["selector"]
        elif one["kind"] in ("StatefulSet", "DaemonSet", "PodDisruptionBudget"):
            yield spec["selector"]["matchLabels"]
        elif one["kind"] == "NetworkPolicy":
            yield spec["podSelector"]["matchLabels"]


def test_pods_are_probed_and_may_do_little(objects: Objects) -> None:
    for workload in workloads(objects):
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert pod["enableServiceLinks"] is False
        for container in (*pod["initContainers"], *pod["containers"]):
            allowed = container["securityContext"]
            assert allowed["readOnlyRootFilesystem"]
            assert allowed["capabilities"] == {"drop": ["ALL"]}
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            claims = workload["spec"].get("volumeClaimTemplates", ())
            volumes = {volume["name"] for volume in pod["volumes"]}
            assert mounts <= volumes | {claim["metadata"]["name"] for claim in claims}
        assert "readinessProbe" in container_of(workload)


def test_a_router_waits_for_the_gates_of_a_load_balancer(rendered: dict[str, Objects]) -> None:
    def gates(name: str) -> Any:
        router = named(rendered[name], "Deployment", "llm-mlx-lm-server-router")
        return router["spec"]["template"]["spec"].get("readinessGates")

    assert gates("secured") == [{"conditionType": "example.com/registered"}]
    assert gates("minimal") is None


def test_an_engine_gets_no_secret_of_the_server(rendered: dict[str, Objects]) -> None:
    for workload in workloads(rendered["node-store"]):
        volumes = workload["spec"]["template"]["spec"]["volumes"]
        (volume,) = [each for each in volumes if each["name"] == "curve-secret"]
        keys = {item["key"] for item in volume["secret"]["items"]}
        is_engine = labels_of(workload)[COMPONENT] == "engine"
        own = {"engine.key", "engine.secret", "server.key"}
        assert keys == (own if is_engine else {"server.key", "server.secret", "allowed"})


def test_a_store_is_beside_the_engine_or_on_its_node_or_nowhere(
    rendered: dict[str, Objects],
) -> None:
    def engine(name: str) -> Settings:
        return settings_of(engines_of(rendered[name])[0])

    beside, on_node, nowhere = engine("minimal"), engine("node-store"), engine("gpu")
    assert (beside.kvstore_socket, beside.no_ssd, beside.ssd_max_size_gb) == ((), False, 20)
    assert on_node.kvstore_socket == ("tcp://llm-mlx-lm-server-kvstore:5556",)
    assert nowhere.no_ssd
    (store,) = pick(rendered["node-store"], "DaemonSet")
    assert settings_of(store).kvstore_socket[1] == "tcp://0.0.0.0:5556"
    service = named(rendered["node-store"], "Service", "llm-mlx-lm-server-kvstore")
    assert service["spec"]["internalTrafficPolicy"] == "Local"
    assert not pick(rendered["minimal"], "DaemonSet")


def test_the_number_of_engines_follows_the_queue(rendered: dict[str, Objects]) -> None:
    (scaler,) = pick(rendered["two-models"], "HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]["name"]
    scaled = named(rendered["two-models"], "StatefulSet", target)
    assert "replicas" not in scaled["spec"]  # an upgrade would set it back
    metric = scaler["spec"]["metrics"][0]["external"]["metric"]
    assert f"`{metric['name']}` | gauge | `model`" in (ROOT / "docs/metrics.md").read_text()
    model = metric["selector"]["matchLabels"]["model"]
    assert settings_of(scaled).served_model_name[0] == model


def test_routers_are_as_many_as_their_processors_need(rendered: dict[str, Objects]) -> None:
    (scaler,) = pick(rendered["secured"], "HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]
    router = named(rendered["secured"], target["kind"], target["name"])
    assert "replicas" not in router["spec"]  # an update of the chart would set it back
    assert container_of(router)["resources"]["requests"]["cpu"]
    assert named(rendered["minimal"], target["kind"], target["name"])["spec"]["replicas"] == 1


def test_several_routers_need_the_same_reasoning_key() -> None:
    for several in ({"replicas": 2}, {"autoscaling": {"minReplicas": 1, "maxReplicas": 3}}):
        values = {**values_of("minimal"), "router": several}
        with pytest.raises(Exception, match="reasoning-key"):
            render(values)
        assert render({**values, "secrets": {"existingSecret": "mine"}})
        assert render({**values, "secrets": {"values": {"reasoning-key": "same"}}})


def test_secrets_are_made_and_used(rendered: dict[str, Objects]) -> None:
    objects = rendered["secured"]
    made = {one["metadata"]["name"]: set(one["stringData"]) for one in pick(objects, "Secret")}
    text = yaml.safe_dump_all(workloads(objects) + pick(objects, "ServiceMonitor"))
    for name, keys in made.items():
        assert name in text
        assert name.endswith("-curve") or all(key in text for key in keys)
    for secret in ("sk-alice", "redis://", "02020202"):
        assert secret not in text
    router = named(objects, "Deployment", "llm-mlx-lm-server-router")
    assert "--api-key-file=/api-keys/keys" in container_of(router)["args"]
    mounts = {each["name"]: each["mountPath"] for each in container_of(router)["volumeMounts"]}
    assert mounts["api-keys"] == "/api-keys"
    (monitor,) = pick(objects, "ServiceMonitor")
    service = named(objects, "Service", "llm-mlx-lm-server-router")
    labels = service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    others = [one for one in pick(objects, "Service") if one is not service]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert not any(wanted <= one["metadata"]["labels"].items() for one in others)


def test_only_engines_reach_the_sockets(rendered: dict[str, Objects]) -> None:
    objects = rendered["node-store"]
    engines = named(objects, "NetworkPolicy", "llm-mlx-lm-server-engine")
    assert engines["spec"]["ingress"] == []
    for component, port in (("router", 5555), ("kvstore", 5556)):
        policy = named(objects, "NetworkPolicy", f"llm-mlx-lm-server-{component}")
        for rule in policy["spec"]["ingress"]:
            if port in [each["port"] for each in rule["ports"]]:
                (peer,) = rule["from"]
                assert peer["podSelector"]["matchLabels"][COMPONENT] == "engine"


@pytest.mark.parametrize(
    ("values", "reason"),
    [({}, "curve.existingSecret"), ({"kvstore": {"mode": "some"}}, "engine, node or none")],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], reason: str) -> None:
    if values:
        values |= {"curve": {"existingSecret": "keys"}}
    with pytest.raises(helm.HelmError, match=reason):
        render(values)
