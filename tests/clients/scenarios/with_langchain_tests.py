"""Runs LangChain's standard tests, and prints a JSON line for each."""

import json
import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("langchain_standard.py")
RESULTS = {"passed": "pass", "failed": "fail", "skipped": "n/a"}


class Lines:
    def __init__(self) -> None:
        self.told: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test is a setup, a call and a teardown; what is told of it is the first that did not
        pass, else that it passed."""
        before = self.told.get(report.nodeid)
        if before is None or before["result"] == "pass":
            name = report.nodeid.rpartition("::")[2]
            result, reason = RESULTS[report.outcome], ""
            if result == "fail":
                crash = getattr(report.longrepr, "reprcrash", None)
                reason = report.longreprtext if crash is None else crash.message
            elif result == "n/a":
                skipped = report.longrepr
                told = skipped[2] if isinstance(skipped, tuple) else str(skipped)
                reason = getattr(report, "wasxfail", "") or told
            reason = reason.removeprefix("Skipped: ").removeprefix("reason: ")
            self.told[report.nodeid] = {"scenario": name, "result": result, "reason": reason}


lines = Lines()
options = {
    "asyncio_mode": "auto",
    "asyncio_default_fixture_loop_scope": "session",
    "asyncio_default_test_loop_scope": "session",  # langchain-openai keeps one client for all
}
arguments = [str(TESTS), *sys.argv[1:], "-c", os.devnull, "--rootdir", str(TESTS.parent)]
arguments += ["-p", "no:cacheprovider", "--tb=short", "--no-header"]
for name, value in options.items():
    arguments += ["-o", f"{name}={value}"]
code = pytest.main(arguments, plugins=[lines])
print()
for told in lines.told.values():
    print(json.dumps(told), flush=True)
sys.exit(code)
