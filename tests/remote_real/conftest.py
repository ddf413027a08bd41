"""A redis-server of a module of tests, and a proxy before it, where they do not make their own."""

import pytest
from rig_net import Proxy
from rig_redis import RedisServer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as each:
        yield each


@pytest.fixture
def proxy(server):
    server.command("FLUSHALL")
    with Proxy(server.port) as each:
        yield each
