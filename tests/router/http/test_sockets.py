from __future__ import annotations

import resource

from pointsman.router.http.sockets import raise_file_limit


def test_all_file_descriptors_that_may_be_had_are_taken() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
