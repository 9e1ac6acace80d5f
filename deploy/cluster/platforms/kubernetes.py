"""`baton render --on kubernetes`: manifests for kustomize, which `kubectl apply -k` takes.

They are the chart, filled in by `helm template` with the values that `--on helm` writes.
"""

import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from baton.deploy.cluster.platforms import helm
from baton.deploy.cluster.platforms.helm import CHART, text_of
from baton.deploy.cluster.processes import ClusterPlan
from baton.deploy.cluster.state import make_private, write_private
from baton.protocol.errors import ConfigError

LABEL = "app.kubernetes.io/component"


def render(plan: ClusterPlan, folder: Path) -> list[Path]:
    """Write the files into `base`, which only this user can read, because it holds the key.

    Raises `ConfigError` if helm is not installed, or refuses the values.
    """
    namespace = plan.description.kubernetes.namespace or plan.description.name
    contents: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for manifest in yaml.safe_load_all(_filled(plan, namespace)):
        if manifest:
            contents[_file_of(manifest)].append(manifest)
    kustomization: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": sorted(contents),
    }
    base = folder / "base"
    make_private(base)
    contents["kustomization.yaml"] = [kustomization]
    for name, manifests in contents.items():
        write_private(base / name, text_of(manifests).encode())
    return [base / name for name in contents]


def _filled(plan: ClusterPlan, namespace: str) -> str:
    """Return what helm makes of the chart and a description's values."""
    program = shutil.which("helm")
    if program is None:
        raise ConfigError(
            "--on kubernetes: helm fills in the manifests and is not installed; install it "
            "(https://helm.sh) where you render; the cluster does not need it"
        )
    words = [
        program,
        "template",
        plan.description.name,
        str(CHART),
        "--namespace",
        namespace,
    ]
    with tempfile.TemporaryDirectory() as folder:
        for path in helm.render(plan, Path(folder)):
            words += ["--values", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise ConfigError(f"helm cannot fill in the chart: {reason}")
    return done.stdout


def _file_of(manifest: dict[str, Any]) -> str:
    """Return the name of a manifest's file: one for each component, and one for secrets."""
    if manifest["kind"] == "Secret":
        return "secrets.yaml"
    labels = manifest["metadata"]["labels"]
    return f"{labels.get(LABEL, 'cluster')}.yaml"
