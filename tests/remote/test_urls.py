"""URLs of key tiers: what they mean, what is wrong with them, and that no password is ever shown."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache import ConfigError, Remote, TieredKVCache, load_config
from tiercache.remote import KeyTier, urls
from tiercache.remote.urls import check_url, open_key_tier, parse_address, shown
from tiercache.remote.valkey import ValkeyOptions

pytest.importorskip("valkey", reason="the extra valkey")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://10.0.0.5", {"host": "10.0.0.5"}),
        ("valkey://h:7000/3", {"host": "h", "port": 7000, "db": 3}),
        ("redis://:p%40ss%2F%23@h/", {"host": "h", "password": "p@ss/#"}),
        ("redis://user:pw@[::1]:1?ttl_s=1.5", {"host": "::1", "port": 1, "username": "user", "password": "pw"}),
        ("rediss://h?check_hostname=no", {"host": "h", "tls": True, "check_hostname": False}),
        ("VALKEYS://h?connections=3", {"host": "h", "tls": True, "connections": 3}),
        ("redis://[fe80::1%25eth0]", {"host": "fe80::1%eth0"}),
        ("unix:///run/x%20y.sock?db=4", {"path": "/run/x y.sock", "db": 4}),
        ("unix://:pw@/run/x.sock", {"path": "/run/x.sock", "password": "pw"}),
    ],
)
def test_what_a_url_means(url, expected):
    expected = {**expected, **({"ttl_s": 1.5} if "ttl_s" in url else {})}
    assert ValkeyOptions.from_url(url) == ValkeyOptions(**expected)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("redis://", "a host is needed"),
        ("redis://:pw@", "a host"),
        ("redis:///3", "a host is needed"),
        ("redis://h:x", "Port could not be cast"),
        ("redis://h:0", "port = 0: an integer from 1 to 65535"),
        ("redis://h:70000", "[Pp]ort"),
        ("redis://[::1", "Invalid IPv6"),
        ("redis://a..b", "cannot be the name of a host"),
        ("redis://h/x", "database = 'x': an integer"),
        ("redis://h/-1", "database = '-1': an integer"),
        ("redis://h/1/2", "database = '1/2'"),
        ("redis://h#1", "nothing may follow a #"),
        ("redis://h?ttl_s=0", "ttl_s = 0.0: seconds from 0.001"),
        ("redis://h?ttl_s=nan", "ttl_s = 'nan': a number"),
        ("redis://h?ttl_s=1&ttl_s=2", "given twice"),
        ("redis://h?ttl_s", "bad query field"),
        ("redis://h?connections=0", "connections = 0: an integer from 1 to 256"),
        ("redis://h?connections=1e3", "connections = '1e3': an integer"),
        ("redis://h?ca=/x", "option ca = '/x': no such option"),
        ("rediss://h?ca=/no/such/file", "option ca = '/no/such/file': no such file"),
        ("rediss://h?key=" + __file__, "give cert"),
        ("rediss://h?check_hostname=maybe", "yes or no"),
        ("redis://h?auth=sesame", r"option auth = '\*\*\*': a password goes before the host"),
        ("redis://h?pwd=sesame", r"option pwd = '\*\*\*': a password goes before the host"),
        ("redis://h?password=sesame", r"option password = '\*\*\*': a password goes before the host"),
        ("unix://run/x", "a path is needed"),
        ("unix://", "a host, or the path of a unix socket"),
    ],
)
def test_wrong_urls(url, match):
    with pytest.raises(ConfigError, match=match) as caught:
        check_url(url)
    assert "sesame" not in str(caught.value)
    with pytest.raises(ConfigError, match=match):
        Remote(url)


def test_files_of_tls(tmp_path):
    names = {name: tmp_path / name for name in ("ca", "cert", "key")}
    for file in names.values():
        file.touch()
    options = ValkeyOptions.from_url("rediss://h?" + "&".join(f"{name}={file}" for name, file in names.items()))
    assert (options.ca, options.cert, options.key) == tuple(map(str, names.values()))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:1/2?ttl_s=3", "redis://h:1/2?ttl_s=3"),
        ("redis://user:pw@h", "redis://user:***@h"),
        ("redis://:pw@h/1", "redis://:***@h/1"),
        ("redis://user@h", "redis://user@h"),
        ("redis://:p/w#x?y@z@h/1", "redis://:***@h/1"),
        ("redis://h?password=pw&db=1", "redis://h?password=***&db=1"),
        ("redis://h?auth_token=pw&PWD=pw", "redis://h?auth_token=***&PWD=***"),
        ("not a url", "not a url"),
        (5, 5),
    ],
)
def test_what_is_shown(url, expected):
    assert shown(url) == expected


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="sesam"), max_size=30), st.text(":@/?#[]&=% ", max_size=6)
)
def test_no_password_is_shown_whatever_is_wrong_with_the_url(rest, odd):
    """Where it stands before an @, and where it is not encoded."""
    for url in (f"redis://u:sesame{odd}@{rest}", f"redis://:{odd}sesame@{rest}", f"rdma://:sesame{odd}@{rest}"):
        try:
            text = repr(Remote(url))
        except ConfigError as error:
            text = f"{error!r} {error} {error.value!r}"
        assert "sesame" not in text


def test_nobody_shows_the_password(caplog):
    url = "redis://user:sesame@127.0.0.1:1/0"
    settings = load_config({"tiers": ["dram:1MiB", {"remote": url, "quota": 0.4}], "namespace": "m", "epoch": "e"})
    assert settings.remote.tier == url
    tier = open_key_tier(url)
    options = ValkeyOptions.from_url(url)
    with pytest.raises(OSError, match=r"127\.0\.0\.1:1") as caught:
        tier.find([bytes(32)], 1.0)
    assert isinstance(tier, KeyTier) and tier.endpoint == "127.0.0.1:1"
    with TieredKVCache([*settings.tiers, settings.remote], namespace="m", epoch="e") as cache:
        texts = [repr(cache), repr(settings), repr(settings.remote), repr(options), repr(tier), repr(caught.value)]
    with pytest.raises(ConfigError) as wrong:
        load_config({"tiers": [url, "dram:1MiB"], "namespace": "m"})
    with pytest.raises(ConfigError) as twice:
        load_config({"tiers": ["dram:1MiB", url, url], "namespace": "m"})
    with pytest.raises(ConfigError) as beside:
        load_config({"tiers": ["dram:1MiB"], "remote": url, "namespace": "m"})
    for text in (*texts, str(wrong.value), str(twice.value), str(beside.value), caplog.text):
        assert "sesame" not in text
    tier.close()


def test_a_library_that_is_missing(monkeypatch):
    monkeypatch.setattr(urls, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"redis://:\*\*\*@h': a library is missing: pip install 'tiercache\[valkey\]'"
    ):
        check_url("redis://:pw@h")


def test_checking_a_url_imports_no_client(python):
    code = """
import sys, tiercache
assert not any(name.startswith(("valkey", "mooncake")) for name in sys.modules)
assert "tiercache.remote.valkey" not in sys.modules
tiercache.load_config({"tiers": ["dram:1MiB", "redis://h"], "namespace": "m", "epoch": "e"})
print("valkey" in sys.modules)
"""
    assert python(code).strip() == "False"
    assert "tiercache.remote.valkey" in sys.modules


def test_options_may_be_asked_for_by_name():
    address = parse_address("x://u:p%41@H:3/a%20b?k=v%26w&l=", ("k", "l"))
    assert (address.host, address.port, address.path, address.username, address.password) == ("h", 3, "/a b", "u", "pA")
    assert address.options == {"k": "v&w", "l": ""}
