"""Files of contrib/: systemd units, a Containerfile, a cluster on Kubernetes."""

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from llamacli.cli.app import app
from llamacli.cli.model_sources import preset_sources

CONTRIB = Path(__file__).parents[1] / "contrib"
VARIABLE = re.compile(r"LLAMACLI_SERVE_(\w+)")


@pytest.mark.medium
@pytest.mark.parametrize(("name", "program"), [("llamacli", "llamacli serve"), ("llamacli-ray", "ray start")])
def test_systemd_unit(tmp_path: Path, name: str, program: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (CONTRIB / f"{name}.service").read_text()
    assert f"ExecStart=/opt/llamacli/bin/{program} " in text
    unit = tmp_path / f"{name}.service"
    unit.write_text(re.sub("/opt/llamacli/bin/[a-z]+", "/bin/true", text))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert f"{name}.service" not in done.stderr, done.stderr


def test_unit_allows_compiled_kernels() -> None:
    for unit in CONTRIB.glob("*.service"):
        assert "MemoryDenyWriteExecute" not in unit.read_text()


@pytest.mark.parametrize(
    "name",
    ["llamacli.service", "llamacli-ray.service", "Containerfile", "kuberay.yaml", "compose.yaml", "kubernetes.yaml"],
)
def test_variables_are_those_of_options(name: str) -> None:
    used = set(VARIABLE.findall((CONTRIB / name).read_text()))
    command = app.commands["serve"]
    assert used
    assert used <= {str(param.name).upper() for param in command.params if isinstance(param, click.Option)}


def test_containerfile_has_known_instructions() -> None:
    text = re.sub(r"\\\n", " ", (CONTRIB / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names = [line.split()[0] for line in lines]
    known = {"FROM", "ARG", "COPY", "RUN", "USER", "ENV", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}
    assert set(names) <= known
    assert (names[0], lines[-1]) == ("FROM", 'ENTRYPOINT ["llamacli", "serve"]')
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_kubernetes_commands_have_known_options() -> None:
    yaml = pytest.importorskip("yaml")
    cluster, servers, service = yaml.safe_load_all((CONTRIB / "kuberay.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    (container,) = servers["spec"]["template"]["spec"]["containers"]
    start, _, serve = container["args"][0].partition(" && ")
    assert f"--address={cluster['metadata']['name']}-head-svc:6379" in start
    words = serve.removeprefix("exec llamacli serve ").split()
    given = app.commands["serve"].make_context("serve", words).params
    assert (given["ray_address"], given["ray_replicas"], given["ray_keep"]) == ("auto", (2, 8), True)
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"]) == given["ray_replicas"]
    assert service["spec"]["selector"] == servers["spec"]["template"]["metadata"]["labels"]


def test_compose_file_gives_both_services_the_same_key_and_port() -> None:
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((CONTRIB / "compose.yaml").read_text())["services"]
    server, page = services["llamacli"], services["open-webui"]
    given = app.commands["serve"].make_context("serve", [*server["command"]]).params
    assert (given["models_dir"], given["port"]) == ("/models", 8080)
    assert server["environment"]["LLAMACLI_SERVE_API_KEYS"] == page["environment"]["OPENAI_API_KEY"]
    assert page["environment"]["OPENAI_API_BASE_URL"] == f"http://llamacli:{given['port']}/v1"
    assert "HEALTHCHECK" in (CONTRIB / "Containerfile").read_text()  # on which open-webui waits
    assert (CONTRIB / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    assert {volume.partition(":")[0] for one in services.values() for volume in one["volumes"]} == {
        "./models", "data", "open-webui",
    }  # fmt: skip


def test_kubernetes_example_has_known_options_and_presets(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    config, claim, server, service = yaml.safe_load_all((CONTRIB / "kubernetes.yaml").read_text())
    template = server["spec"]["template"]
    (container,) = template["spec"]["containers"]
    given = app.commands["serve"].make_context("serve", [*container["args"]]).params
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert Path(given["models_preset"]) == Path(mounts["presets"]) / "models.ini"
    (tmp_path / "models.ini").write_text(config["data"]["models.ini"])
    assert [source.name for source in preset_sources(tmp_path / "models.ini", {})] == ["demo"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert service["spec"]["selector"] == template["metadata"]["labels"] == server["spec"]["selector"]["matchLabels"]
    assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.parametrize(
    "path", sorted((CONTRIB.parent / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem
)
def test_workflows_name_targets_that_exist(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    makefile = (CONTRIB.parent / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    workflow = yaml.safe_load(path.read_text())
    for job in workflow["jobs"].values():
        assert {*job.get("needs", "").split()} <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert set(re.findall(r"\bmake ([\w-]+)", step.get("run", ""))) <= targets
            assert all(
                (CONTRIB.parent / script).is_file() for script in re.findall(r"\btools/\S+\.py", step.get("run", ""))
            )
