"""The reader of replies: however bytes arrive they are the same replies; nonsense, ends and deadlines are told."""

import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.remote.resp import ProtocolError, Replies, ReplyError, packed


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def attached(sock, seconds=5.0):
    replies = Replies()
    replies.attach(sock)
    replies.until = time.monotonic() + seconds
    return replies


REPLY = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.none(),
    st.binary(max_size=40),
    st.integers(16000, 40000).map(lambda n: bytes(range(256)) * (n // 256)),
    st.sampled_from([b"+OK", b"+PONG"]).map(lambda text: ("status", text)),
    st.sampled_from(["OOM no", "ERR \r"[:-1], "LOADING it"]).map(ReplyError),
)


def wire(reply):
    match reply:
        case ReplyError(text):
            return b"-%s\r\n" % text.encode()
        case ("status", text):
            return text + b"\r\n"
        case int():
            return b":%d\r\n" % reply
        case None:
            return b"$-1\r\n"
    return b"$%d\r\n%s\r\n" % (len(reply), reply)


@given(st.lists(REPLY, max_size=8), st.lists(st.integers(1, 20000), max_size=30), st.booleans())
def test_replies_come_as_they_were_sent_however_they_are_cut(replies, cuts, into_rows):
    sent = b"".join(map(wire, replies))
    ours, theirs = socket.socketpair()

    def send():
        at = 0
        for cut in [*cuts, len(sent)]:
            theirs.sendall(sent[at : at + cut])
            at += cut

    thread = threading.Thread(target=send)
    with ours, theirs:
        thread.start()
        reader = attached(ours)
        for reply in replies:
            expected = reply[1][1:] if isinstance(reply, tuple) else reply
            if into_rows and isinstance(reply, bytes):
                row = np.zeros(len(reply), dtype=np.uint8)
                assert reader.value_into(memoryview(row)) is True
                assert row.tobytes() == reply
            elif into_rows and reply is None:
                assert reader.value_into(memoryview(np.zeros(3, dtype=np.uint8))) is False
            else:
                assert reader.reply() == expected
        assert reader.is_quiet
        thread.join(5)


@pytest.mark.parametrize("nbytes", [0, 1, 9, 11, 5000, 100_000])
def test_a_value_of_another_width_is_passed_over(ends, nbytes):
    ours, theirs = ends
    sender = threading.Thread(target=theirs.sendall, args=(wire(bytes(nbytes)) + b":7\r\n",))
    sender.start()
    row = np.full(10, 0xA5, dtype=np.uint8)
    replies = attached(ours)
    assert replies.value_into(memoryview(row)) is False
    assert (row == 0xA5).all()
    assert replies.reply() == 7
    sender.join(5)


@pytest.mark.parametrize(
    "sent",
    [
        b"*1\r\n:1\r\n",
        b"hello\r\n",
        b"\r\n",
        b":1x\r\n",
        b":\r\n",
        b":--1\r\n",
        b":" + b"1" * 30 + b"\r\n",
        b"$-2\r\n",
        b"$99999999999\r\n",
        b"$x\r\n",
        b"$4\r\nabcdefgh",
        b"$4\r\nabcd\n\r",
        b"+" + b"a" * 20000,
    ],
)
def test_nonsense(ends, sent):
    ours, theirs = ends
    theirs.sendall(sent)
    with pytest.raises(ProtocolError):
        attached(ours).reply()
    with pytest.raises(ProtocolError):
        replies = attached(ours)
        replies._buffer[: len(sent)], replies._end = sent[:16384], min(len(sent), 16384)
        replies.value_into(memoryview(bytearray(4)))


@pytest.mark.parametrize("sent", [b"", b":1", b"$4\r\nab", b"$4\r\nabcd", b"$4\r\nabcd\r"])
def test_an_end_in_the_middle(ends, sent):
    ours, theirs = ends
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(ConnectionError):
        attached(ours).reply()
    with pytest.raises(ConnectionError):
        attached(None).reply()


@pytest.mark.parametrize("sent", [b"", b":1", b"$4\r\nab", b"$4\r\nabcd"])
def test_a_silence_ends_at_the_deadline(ends, sent):
    ours, theirs = ends
    theirs.sendall(sent)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        attached(ours, 0.05).value_into(memoryview(bytearray(4)))
    assert 0.04 < time.monotonic() - began < 0.5
    with pytest.raises(TimeoutError, match="in time"):
        attached(ours, -1).reply()


def test_a_trickle_ends_at_the_deadline(ends):
    """A byte now and then does not put it off."""
    ours, theirs = ends
    ended = threading.Event()

    def trickle():
        theirs.sendall(b"$1000\r\n")
        while not ended.wait(0.01):
            theirs.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            attached(ours, 0.2).value_into(memoryview(bytearray(1000)))
    finally:
        took = time.monotonic() - began
        ended.set()
        thread.join(5)
    assert 0.19 < took < 0.6


def test_a_reader_that_does_not_read_ends_sending_at_the_deadline(ends):
    ours, _ = ends
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        attached(ours, 0.1).send([bytes(64), memoryview(bytes(32 << 20))])
    assert time.monotonic() - began < 0.6


@given(st.lists(st.lists(st.tuples(st.binary(max_size=80), st.booleans()), min_size=1, max_size=4), max_size=5))
def test_commands_as_they_are_sent(commands):
    words = [[memoryview(word) if seen else word for word, seen in each] for each in commands]
    expected = b""
    for each in commands:
        expected += b"*%d\r\n" % len(each)
        for word, _ in each:
            expected += b"$%d\r\n" % len(word) + word + b"\r\n"
    pieces = packed(words)
    assert b"".join(pieces) == expected
    views = [word for each in words for word in each if isinstance(word, memoryview)]
    assert [each is view for each, view in zip(filter(is_view, pieces), views, strict=True)] == [True] * len(views)


def is_view(piece):
    return isinstance(piece, memoryview)
