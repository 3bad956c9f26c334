"""Run LangChain's standard tests, and print a line of JSON for each."""

import json
import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("langchain_standard.py")
RESULTS = {"passed": "pass", "failed": "fail", "skipped": "n/a"}


class ResultCollector:
    def __init__(self) -> None:
        self.results: dict[str, dict[str, str]] = {}
        """The line of each test, by its id."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the first report of a test (setup, call, teardown) that is not a pass, if any."""
        before = self.results.get(report.nodeid)
        if before is None or before["result"] == "pass":
            name = report.nodeid.rpartition("::")[2]
            result, reason = RESULTS[report.outcome], ""
            if result == "fail":
                crash = getattr(report.longrepr, "reprcrash", None)
                reason = report.longreprtext if crash is None else crash.message
            elif result == "n/a":
                skipped = report.longrepr
                message = skipped[2] if isinstance(skipped, tuple) else str(skipped)
                reason = getattr(report, "wasxfail", "") or message
            reason = reason.removeprefix("Skipped: ").removeprefix("reason: ")
            self.results[report.nodeid] = {"scenario": name, "result": result, "reason": reason}


collector = ResultCollector()
options = {
    "asyncio_mode": "auto",
    "asyncio_default_fixture_loop_scope": "session",
    "asyncio_default_test_loop_scope": "session",  # langchain-openai keeps one client for all
}
arguments = [str(TESTS), *sys.argv[1:], "-c", os.devnull, "--rootdir", str(TESTS.parent)]
arguments += ["-p", "no:cacheprovider", "--tb=short", "--no-header"]
for name, value in options.items():
    arguments += ["-o", f"{name}={value}"]
code = pytest.main(arguments, plugins=[collector])
print()
for line in collector.results.values():
    print(json.dumps(line), flush=True)
sys.exit(code)
