"""The child's side of the benchmark: one JSON object a line on stdin, one on stdout, until stdin ends.

A request is `{"op": NAME, ...arguments}`; the answer is what the driver's method of that name returns, a dict. A driver
that lacks the method, or raises, answers `{"failed": WHY}` and lives on. What a library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["UnsupportedError", "serve"]


class UnsupportedError(Exception):
    """Raised by a driver for what its library does not do; the text says what."""


def serve(make: Callable[[], Any]) -> None:
    """Answer requests with the methods of the driver that `make` returns until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    driver = make()
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        method = None if op.startswith("_") else getattr(driver, op, None)
        try:
            if method is None:
                raise UnsupportedError(f"nothing like {op} here")
            answer = method(**request)
        except UnsupportedError as error:
            answer = {"failed": str(error)}
        except Exception as error:  # noqa: BLE001 - a foreign library may raise anything; the table then says what
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # threads that a library never ends must not keep the process
