"""Variables in a plan for addresses and folders that only the machine of a process knows.

`slurm` and `ray` plan with these variables, because their scheduler chooses the machines. On the
process's machine, `filled` replaces them by values. This file is pure.
"""

from collections.abc import Mapping

import msgspec

from baton.deploy.cluster.processes import ProcessSpec

OWN_ADDRESS, FOLDER = "$(OWN_ADDRESS)", "$(FOLDER)"
_SHIFTED = {"peers": "BATON_NODE_BIND", "http": "BATON_NODE_HTTP"}


def filled(spec: ProcessSpec, host: str, nth: int, values: Mapping[str, str]) -> ProcessSpec:
    """Return `spec` as it runs on `host`, as the `nth` node of its pool there.

    `values` holds the text of each variable. `nth` is added to fixed ports of a node.
    """
    env = {name: _with_values(text, values) for name, text in spec.env.items()}
    if spec.role != "router":
        for port in spec.ports:
            name = _SHIFTED[port.name]
            env[name] = f"{env[name].removesuffix(str(port.port))}{port.port + nth}"
    argv = tuple(_with_values(word, values) for word in spec.argv)
    return msgspec.structs.replace(spec, argv=argv, env=env, host=host)


def _with_values(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text
