"""mooncake:// URLs."""

from __future__ import annotations

import pytest

from tiercache.errors import ConfigError
from tiercache.remote.mooncake_options import MooncakeOptions


def test_a_host_and_a_port_are_enough() -> None:
    options = MooncakeOptions.from_url("mooncake://10.0.0.1:50051")
    assert options == MooncakeOptions(masters=("10.0.0.1:50051",))
    assert options.master_address == options.endpoint == "10.0.0.1:50051"
    assert (options.protocol, options.segment_nbytes, options.replicas) == ("tcp", 0, 1)


def test_every_option() -> None:
    url = (
        "mooncake://[::1]:1?protocol=rdma&device=mlx5_0&segment=8GiB&buffer=512MiB&replicas=3&metadata=P2PHANDSHAKE"
        "&local=10.0.0.7&client=&ha=&metrics=[::1]:9003"
    )
    assert MooncakeOptions.from_url(url) == MooncakeOptions(
        masters=("[::1]:1",),
        protocol="rdma",
        device="mlx5_0",
        segment_nbytes=8 << 30,
        buffer_nbytes=512 << 20,
        replicas=3,
        local="10.0.0.7",
        metrics="[::1]:9003",
    )


def test_what_is_percent_encoded_is_decoded_once() -> None:
    options = MooncakeOptions.from_url(" mooncake://a:1?metadata=http%3A%2F%2Fm%2Fa%252Fb\n")
    assert options.metadata == "http://m/a%2Fb"


def test_masters_that_etcd_elects() -> None:
    options = MooncakeOptions.from_url("mooncake://a:2379,b:2379,c:2379?ha=etcd")
    assert options.master_address == "etcd://a:2379;b:2379;c:2379"
    assert options.endpoint == "a:2379,b:2379,c:2379"


@pytest.mark.parametrize(
    ("url", "field", "remedy"),
    [
        ("redis://a:1", "tier", "mooncake://"),
        ("mooncake://", "host", "host:port"),
        ("mooncake://a", "host", "host:port"),
        ("mooncake://a:0", "host", "host:port"),
        ("mooncake://a:65536", "host", "host:port"),
        ("mooncake://user:secret@a:1", "tier", "host"),
        ("mooncake://[a:1", "tier", "read"),
        ("mooncake://a:1/path", "tier", "options"),
        ("mooncake://a:1,b:1", "host", "ha=etcd"),
        ("mooncake://a:1?protocoll=tcp", "option", "protocol"),
        ("mooncake://a:1?protocol=shm", "protocol", "tcp, rdma"),
        ("mooncake://a:1?protocol=tcp&protocol=rdma", "protocol", "once"),
        ("mooncake://a:1?segment=8G", "segment", "8GiB"),
        ("mooncake://a:1?buffer=1KiB", "buffer", "1048576"),
        ("mooncake://a:1?replicas=0", "replicas", "1 to 16"),
        ("mooncake://a:1?replicas=two", "replicas", "1 to 16"),
        ("mooncake://a:1?ha=redis", "ha", "etcd"),
        ("mooncake://a:1?metrics=9003", "metrics", "host:port"),
        ("mooncake://a..b:1", "host", "name of a host"),
        ("mooncake://a:1?metrics=" + "x" * 64 + ":1", "metrics", "name of a host"),
        ("mooncake://a:1?segmet=8GiB", "option", "segment?"),
    ],
)
def test_what_is_wrong_is_named(url: str, field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MooncakeOptions.from_url(url)
    assert field in caught.value.field
    assert remedy in caught.value.remedy
    assert "secret" not in str(caught.value)
