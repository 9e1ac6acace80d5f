"""`baton render --on helm`: the manifests of Kubernetes as a chart.

The values are what a description says, so `helm install` without others gives the manifests of
`--on kubernetes`. The number of routers is fixed, because nodes dial each of them.
"""

import re
from pathlib import Path
from typing import Any

import msgspec

from baton.deploy.cluster.platforms.kubernetes import LABELS, objects_of, text_of
from baton.deploy.cluster.processes import ROUTERS, ClusterPlan
from baton.deploy.cluster.state import write_private
from baton.protocol import VERSION

# What every pod has; all other fields are values.
FIXED = (
    "automountServiceAccountToken", "enableServiceLinks", "terminationGracePeriodSeconds",
    "securityContext", "containers", "initContainers",
)  # fmt: skip
# Texts that stand for a value, or for all keys of one, until an object is text.
_VALUE, _KEYS = "HELM-VALUE", "HELM-KEYS"


def render(plan: ClusterPlan, folder: Path) -> list[Path]:
    """Write the chart, and a private file of values with the key and other secrets."""
    description = plan.description
    options = msgspec.structs.replace(description.kubernetes, image=f"{_VALUE}(image)")
    named = msgspec.structs.replace(description, kubernetes=options)
    values: dict[str, Any] = {
        "image": description.kubernetes.image,
        "service": {"type": "ClusterIP"},
        "components": {},
    }
    secrets: dict[str, Any] = {}
    texts = {}
    for name, objects in objects_of(ClusterPlan(named, plan.processes)).items():
        for one in objects:
            _take_values(one, values, secrets)
        texts[f"templates/{name}"] = _template(text_of(objects))
    texts["values.yaml"] = text_of([values])
    texts["Chart.yaml"] = text_of(
        [
            {
                "apiVersion": "v2",
                "name": description.name,
                "description": "Routers, prefill and decode nodes of baton",
                "version": VERSION,
                "appVersion": VERSION,
            }
        ]
    )
    files = {folder / "chart" / name: text for name, text in texts.items()}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if secrets:
        write_private(folder / "secrets.yaml", text_of([{"secrets": secrets}]).encode())
        return [*files, folder / "secrets.yaml"]
    return list(files)


def _take_values(one: dict[str, Any], values: dict[str, Any], secrets: dict[str, Any]) -> None:
    """Move what people change from an object to the values."""
    component, spec = one["metadata"]["labels"][f"{LABELS}component"], one.get("spec", {})
    if one["kind"] == "Secret":
        secrets[component] = one["stringData"]
        names = {name: f"{_VALUE}(secrets/{component}/{name})" for name in one["stringData"]}
        one["stringData"] = names
    elif one["kind"] == "Service" and "ports" in spec:
        spec[_KEYS] = "service"
    elif one["kind"] == "StatefulSet":
        at, pod, about = f"components/{component}", *map(spec["template"].get, ("spec", "metadata"))
        (container,) = pod["containers"]
        values["components"][component] = own = {
            "pod": {name: pod.pop(name) for name in list(pod) if name not in FIXED},
            "annotations": about["annotations"],
            "resources": container["resources"],
        }
        if component != ROUTERS and "replicas" in spec:
            own["replicas"] = spec["replicas"]
            spec["replicas"] = f"{_VALUE}({at}/replicas)"
        pod[_KEYS] = f"{at}/pod"
        about["annotations"] = {_KEYS: f"{at}/annotations"}
        container["resources"] = {_KEYS: f"{at}/resources"}


def _template(text: str) -> str:
    """Return the template of objects that hold texts for values."""
    text = text.replace("{{", '{{ "{{" }}')
    text = re.sub(
        rf"{_VALUE}\((.+?)\)", lambda found: f"{{{{ {_path(found[1])} | toJson }}}}", text
    )
    return re.sub(rf"^( *){_KEYS}: (.+)$", _keys, text, flags=re.MULTILINE)


def _keys(found: re.Match[str]) -> str:
    indent, path = found[1], _path(found[2])
    lines = (f"with {path}", f"toYaml . | nindent {len(indent)}", "end")
    return "\n".join(f"{indent}{{{{- {line} }}}}" for line in lines)


def _path(keys: str) -> str:
    return " ".join(["index .Values", *(f'"{key}"' for key in keys.split("/"))])
