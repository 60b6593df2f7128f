"""A long run names what failed at once, not only at its end."""

import pytest


class Failures:
    """Prints a line, with the reason, as soon as a test fails, on whichever process it ran."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message.partition("\n")[0][:200] if crash else ""
            self._terminal.write_line(f"\n{report.when} failed: {report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(terminal))
