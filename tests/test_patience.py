"""A lock that is looked at again before it is waited for."""

import threading
import time

from tiercache.patience import acquire_patiently

WAIT_S = 5.0


def test_a_free_lock_is_taken():
    lock = threading.Lock()
    acquire_patiently(lock)
    assert lock.locked()


def test_threads_exclude_each_other():
    lock, inside, most, rounds = threading.Lock(), [0], [0], 200

    def work():
        for _ in range(rounds):
            acquire_patiently(lock)
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0)
            inside[0] -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(WAIT_S * 4)
    assert most == [1] and inside == [0] and not any(each.is_alive() for each in threads)


def test_who_waits_long_stands_in_line_and_gets_it():
    lock, got = threading.Lock(), threading.Event()
    lock.acquire()

    def wait():
        acquire_patiently(lock)
        got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.wait(0.05)
    lock.release()
    assert got.wait(WAIT_S)
    thread.join(WAIT_S)
