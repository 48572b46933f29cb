"""What another user of this machine can do, where the tests run as root."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

NOBODY = 12345  # no account has this number

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def by_another_user(act: Callable[[], bool]) -> bool:
    """What `act` returns in a process of another user; False if it raises OSError."""
    child = os.fork()
    if not child:
        code = 2
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = 0 if act() else 1
        except OSError:
            code = 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), "the child failed"
    return code == 0
