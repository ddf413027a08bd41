"""`python private_network.py COMMAND...`: run a command in a network of its own, with the loopback interface alone.

As root, or as anybody where the kernel lets users have namespaces. Says so and fails where neither works.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from debian_packages import MissingPackageError, program


def entered() -> list[str] | None:
    """The command's first words that enter such a network here; None where that cannot be had."""
    try:
        unshare, ip = str(program("unshare")), shlex.quote(str(program("ip")))
    except MissingPackageError as missing:
        raise SystemExit(f"*** {missing} ***") from None
    for flag in ("-n", "-rn"):
        command = [unshare, flag, "--", "sh", "-c", f'{ip} link set lo up && exec "$@"', "sh"]
        try:
            done = subprocess.run([*command, "true"], capture_output=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if not done.returncode:
            return command
    return None


def main() -> None:
    command = entered()
    if command is None:
        raise SystemExit(
            "*** NO PRIVATE NETWORK CAN BE HAD HERE: these tests start servers that listen on every address and run "
            "in a network namespace only. It takes `unshare` and `ip` (util-linux, iproute2), and root or user "
            "namespaces ***"
        )
    os.execvp(command[0], [*command, *sys.argv[1:]])


if __name__ == "__main__":
    main()
