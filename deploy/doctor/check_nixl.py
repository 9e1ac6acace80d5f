"""`python -m baton.deploy.doctor.check_nixl [DEVICE]`: print this machine's `NixlFacts` as JSON.

The prober runs it in a separate process, because a library that does not fit the machine may end
the process. It makes an agent as a node does, then asks the UCX that NIXL has loaded for its lanes.
"""

import ctypes
import os
import re
import sys
import tempfile
from pathlib import Path

import msgspec

from baton.deploy.doctor.facts import NixlFacts
from baton.deploy.doctor.ucx_log import UcxLog
from baton.kv_transfer.transports.nixl_binding import is_installed, make_agent
from baton.protocol.errors import ConfigError

# From ucp_def.h and ucp.h of UCX 1.x.
API_VERSION = (1, 0)
PARAM_FEATURES, FEATURE_RMA = 1, 2
PARAMS_BYTES = 512  # more than the struct has in any version
LOADED = re.compile(r"\S+/libucp-?\S*\.so\S*")
RESOURCE = re.compile(r"resource \d+ .* (\S+/\S+)")


def nixl_facts(device: str) -> NixlFacts:
    if not is_installed():
        return NixlFacts()
    log = UcxLog()
    try:
        # The agent is held, because UCX is unloaded with the last agent.
        agent = make_agent("doctor", device)
    except ConfigError as error:
        # NIXL itself gives no reason.
        return NixlFacts(is_installed=True, failure=f"{error.message}: {log.complaint()}")
    finally:
        log.close()
    os.environ["UCX_NET_DEVICES"] = device or "all"
    facts = NixlFacts(is_installed=True, lanes=tuple(ucx_lanes()))
    del agent
    return facts


def ucx_lanes() -> list[str]:
    """Return the transport/device pairs that UCX has opened here; empty if it cannot be asked."""
    found = LOADED.search(Path("/proc/self/maps").read_text())
    if found is None:
        return []
    ucp = ctypes.CDLL(found.group())
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    params = ctypes.create_string_buffer(
        ctypes.c_uint64(PARAM_FEATURES).value.to_bytes(8, sys.byteorder)
        + FEATURE_RMA.to_bytes(8, sys.byteorder),
        PARAMS_BYTES,
    )
    if ucp.ucp_config_read(None, None, ctypes.byref(config)) != 0:
        return []
    if ucp.ucp_init_version(*API_VERSION, params, config, ctypes.byref(context)) != 0:
        return []
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
        ucp.ucp_context_print_info(context, stream)
        libc.fclose(stream)
        text = Path(file.name).read_text()
    return lanes_in(text)


def lanes_in(text: str) -> list[str]:
    """Return the lanes in UCX's description of a context, such as `tcp/eth0`."""
    return list(dict.fromkeys(RESOURCE.findall(text)))


if __name__ == "__main__":
    facts = nixl_facts(*sys.argv[1:2] or ("",))
    os.write(1, b"\n" + msgspec.json.encode(facts) + b"\n")
    # The exit skips UCX's cleanup.
    os._exit(0)
