"""The child processes of tests: `python -m tests.support.child_roles ROLE`."""

import signal
import subprocess
import sys
import time

from baton.runtime.process import Child, Command, die_with_parent

FOREVER_S = 3600.0


def main(role: str, *rest: str) -> int:
    die_with_parent()
    match role:
        case "exit":
            print("first line")
            print("last line", file=sys.stderr)
            return int(rest[0])
        case "lines":
            print(*range(int(rest[0])), sep="\n")
        case "wait":
            print("ready")
            time.sleep(FOREVER_S)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("ready")
            time.sleep(FOREVER_S)
        case "leave-one":
            # It is in our process group, so it must end with us although no process waits for it.
            left = subprocess.Popen(
                [sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"]
            )
            print(left.pid)
        case "parent":
            grandchild = Child(
                Command("grandchild", ("wait",), "tests.support.child_roles")
            )
            print(grandchild.pid)
            time.sleep(FOREVER_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
