"""A real redis-server for tests: on loopback or a unix socket, with password, TLS, a bound on its memory; killed,
stopped and started again by its pid. It ends with this process, and keeps nothing on disk."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from debian_packages import program
from rig_island import Island

__all__ = ["HOST", "Certificates", "RedisServer", "free_port"]

HOST = "127.0.0.1"
UP_S = 20.0
"""How long a server may take until it answers."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Certificates:
    """An authority, and a certificate that it signed. Files."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def make(cls, place: Path, names: str = f"DNS:localhost,IP:{HOST}") -> Certificates:
        """New ones in this folder, for these names."""
        place.mkdir(parents=True, exist_ok=True)
        ca, ca_key, cert, key = (place / name for name in ("ca.pem", "ca.key", "cert.pem", "cert.key"))
        request, file = place / "request.pem", place / "names"
        file.write_text(f"subjectAltName={names}\n")
        new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl(*new, "-x509", "-days", "2", "-subj", "/CN=test authority", "-keyout", ca_key, "-out", ca)
        _openssl(*new, "-subj", "/CN=localhost", "-keyout", key, "-out", request)
        signed = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", file)
        _openssl("x509", "-req", "-in", request, *signed, "-out", cert)
        return cls(ca, cert, key)


def _openssl(*words: object) -> None:
    subprocess.run([program("openssl"), *map(str, words)], check=True, capture_output=True, timeout=60)


@dataclass
class RedisServer:
    """One server. `start()` returns when it answers."""

    place: Path
    """A folder of its own."""
    port: int = field(default_factory=free_port)
    maxmemory: str = "0"
    policy: str = "noeviction"
    password: str = ""
    tls: Certificates | None = None
    unix: bool = False
    more: tuple[str, ...] = ()
    """Further words of its command line."""
    on: Island | None = None
    """Where it runs, and listens; None: here."""

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.log = self.place / "redis.log"
        self.socket = self.place / "redis.sock"

    @property
    def _host(self) -> str:
        return HOST if self.on is None else self.on.there

    @property
    def url(self) -> str:
        """Where a tier finds it."""
        user = f":{self.password}@" if self.password else ""
        if self.unix:
            return f"unix://{user}{self.socket}"
        if self.tls:
            return f"rediss://{user}{HOST}:{self.port}?ca={self.tls.ca}"
        return f"redis://{user}{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> RedisServer:
        """Run it, empty."""
        self.place.mkdir(parents=True, exist_ok=True)
        words: list[object] = [program("setpriv"), "--pdeathsig", "KILL", "--", program("redis-server")]
        words += [
            "--bind",
            self._host,
            "--protected-mode",
            "no",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            self.place,
            "--io-threads",
            "1",
        ]
        words += ["--maxmemory", self.maxmemory, "--maxmemory-policy", self.policy, *self.more]
        words += ["--port", 0 if self.tls or self.unix else self.port]
        if self.unix:
            words += ["--unixsocket", self.socket]
        if self.tls:
            words += ["--tls-port", self.port, "--tls-ca-cert-file", self.tls.ca, "--tls-auth-clients", "no"]
            words += ["--tls-cert-file", self.tls.cert, "--tls-key-file", self.tls.key]
        if self.password:
            words += ["--requirepass", self.password]
        with self.log.open("ab") as log:
            command = [str(word) for word in words]
            if self.on is not None:
                command = self.on.on(command)
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.place)
        until = time.monotonic() + UP_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"redis-server did not come up:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.01)
        return self

    def _listens(self) -> bool:
        kind, place = (socket.AF_UNIX, str(self.socket)) if self.unix else (socket.AF_INET, (self._host, self.port))
        with socket.socket(kind) as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(place) == 0

    def stop(self) -> None:
        """It hangs: the kernel goes on taking connections and bytes for it, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """After `stop`."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """As a crash does it; what it held is gone. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(10)

    def command(self, *words: str) -> str:
        """What the server answers to a command, as redis-cli prints it."""
        place = ["-s", str(self.socket)] if self.unix else ["-h", self._host, "-p", str(self.port)]
        secure = ["--tls", "--cacert", str(self.tls.ca)] if self.tls else []
        environment = {**os.environ, **({"REDISCLI_AUTH": self.password} if self.password else {})}
        cli = [str(program("redis-cli")), *place, *secure, *words]
        done = subprocess.run(cli, capture_output=True, text=True, timeout=20, check=True, env=environment)
        return done.stdout.strip()

    def __enter__(self) -> RedisServer:
        return self.start() if self._process is None else self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
