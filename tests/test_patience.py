"""A lock that is looked at again before it is waited for."""

import threading
import time

from tiercache.patience import PatientLock

WAIT_S = 5.0


def test_it_is_a_lock():
    lock = PatientLock()
    with lock:
        assert lock.locked() and not lock.acquire(False) and not lock.acquire(timeout=0.01)
    assert not lock.locked() and lock.acquire() and lock.locked()
    lock.release()
    assert lock.acquire(timeout=0.01)


def test_threads_exclude_each_other():
    lock, inside, most, rounds = PatientLock(), [0], [0], 200

    def work():
        for _ in range(rounds):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(WAIT_S * 4)
    assert most == [1] and inside == [0] and not any(each.is_alive() for each in threads)


def test_who_waits_long_stands_in_line_and_gets_it():
    lock, got = PatientLock(), threading.Event()
    lock.acquire()

    def wait():
        with lock:
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.wait(0.05)
    lock.release()
    assert got.wait(WAIT_S)
    thread.join(WAIT_S)


def test_a_condition_over_it_wakes_who_waits():
    lock, ready = PatientLock(), [False]
    changed = threading.Condition(lock)

    def later():
        with lock:
            ready[0] = True
            changed.notify_all()

    with changed:
        threading.Thread(target=later).start()
        assert changed.wait_for(lambda: ready[0], WAIT_S)
        assert lock.locked()
    assert not lock.locked()
