# SPDX-License-Identifier: Apache-2.0
import contextlib
from collections.abc import Iterator


class _NoMetric:
    def stats(self) -> list[tuple[str, int]]:
        return [("TotalNumber", 0)]


@contextlib.contextmanager
def metric_localcontext(name: str) -> Iterator[_NoMetric]:
    yield _NoMetric()
