"""The files by which a cluster starts a run: as far as a machine without one can look at them."""

import json
import shlex

import pytest
import yaml
from test_blocks import ROOT, blocks_of, check_line, lines_of

PAGE = ROOT / "docs" / "howto" / "several_machines.md"


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return {block.title: block.code for block in blocks_of(PAGE) if block.title}


def pods_of(document: dict) -> list[dict]:
    """The pod templates of a manifest."""
    spec = document["spec"]
    if document["kind"] == "Job":
        return [spec["template"]["spec"]]
    cluster = spec["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_every_pod_has_the_shared_memory_that_rows_are_in(files):
    pods = [
        pod
        for name in ("trainers.yaml", "preparers.yaml")
        for document in yaml.safe_load_all(files[name])
        if document["kind"] != "Service"
        for pod in pods_of(document)
    ]
    assert len(pods) == 3
    for pod in pods:
        in_memory = {one["name"] for one in pod["volumes"] if one["emptyDir"]["medium"] == "Memory"}
        for container in pod["containers"]:
            mounted = {one["name"] for one in container["volumeMounts"] if one["mountPath"] == "/dev/shm"}
            assert mounted and mounted <= in_memory
            assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def test_trainers_find_each_other_by_name(files, composed):
    service, job = yaml.safe_load_all(files["trainers.yaml"])
    assert (service["apiVersion"], service["kind"], service["spec"]["clusterIP"]) == ("v1", "Service", "None")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["completionMode"] == "Indexed", "each pod has a number, and a name made of it"
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    first = f"{name}-0.{pod['subdomain']}"
    (script,) = container["args"]
    torchrun = next(words for words in lines_of(script) if words[0] == "torchrun")
    assert f"--rdzv-endpoint={first}:29500" in torchrun and f"ray start --address={first}:6379" in script
    machines = int(next(word for word in torchrun if word.startswith("--nnodes=")).partition("=")[2])
    assert machines == spec["completions"] == spec["parallelism"]
    check_line(torchrun, composed)
    (config,) = composed
    assert config.trainer.num_nodes == machines
    assert config.trainer.devices == container["resources"]["limits"]["nvidia.com/gpu"]


def test_preparers_have_the_resource_that_the_source_asks_for(files, composed):
    job = yaml.safe_load(files["preparers.yaml"])
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    check_line(shlex.split(job["spec"]["entrypoint"]), composed)
    (config,) = composed
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    given = json.loads(json.loads(group["rayStartParams"]["resources"]))  # KubeRay puts the text on a shell's line
    assert given == {config.source.label: 1}
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]
    assert all(isinstance(value, str) for one in (head, group["rayStartParams"]) for value in one.values())
    assert config.source.address == "auto"


def test_a_job_of_slurm_has_as_many_machines_as_its_training(files, composed):
    script = files["train.slurm"]
    options = dict(
        word[2:].split("=")
        for line in script.splitlines()
        if line.startswith("#SBATCH")
        for word in line.split()[1:]
        if "=" in word
    )
    for words in lines_of(script):
        check_line(words, composed)
    (config,) = composed
    assert int(options["nodes"]) == config.trainer.num_nodes
    assert int(options["gpus-per-node"]) == config.trainer.devices
    assert options["ntasks-per-node"] == "1", "torchrun starts the others"
