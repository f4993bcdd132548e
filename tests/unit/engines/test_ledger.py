"""Ledger and version windows: user-demand case A5, on small fake hosts."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest

from baige_device.engines.ledger import Ledger, Row
from baige_device.engines.versions import HostWindow, base_release
from baige_device.errors import MountError


class Window(HostWindow):
    """A host that is not installed as a distribution."""

    def installed(self) -> str | None:
        return "0.33.0"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("fakehost")
    exec("class Engine:\n    def step(self): return 'host'\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "fakehost", module)
    return module


def ledger(*rows: Row) -> Ledger:
    return Ledger("fakehost", Window("fakehost", ">=0.30,<0.34"), rows)


STEP = Row("fakehost:Engine.step", "patch", "to count steps", ">=0.30,<0.34", "when the host counts")


def test_patch_is_applied_once_and_keeps_the_original(host: ModuleType) -> None:
    book = ledger(STEP)
    for _ in range(2):
        book.patch(STEP.target, lambda original: lambda self: original(self) + "+ours")
    assert host.Engine().step() == "host+ours"
    book.verify_applied(["core"])


def test_a_patch_without_a_row_is_refused(host: ModuleType) -> None:
    with pytest.raises(MountError, match=r"fakehost:Engine\.run has no ledger row"):
        ledger(STEP).patch("fakehost:Engine.run", lambda original: original)


def test_a_missing_target_is_an_error_that_names_target_row_and_window(host: ModuleType) -> None:
    gone = Row("fakehost:Engine.stride", "patch", "to count strides", ">=0.30,<0.34")
    with pytest.raises(
        MountError, match=r"0\.33\.0: patch target fakehost:Engine\.stride is missing.*count strides.*>=0\.30"
    ):
        ledger(gone).patch(gone.target, lambda original: original)
    state = ledger(gone).states()[0]
    assert (state.applies, state.exists, state.applied) == (True, False, False)


def test_a_seam_row_is_never_patched_and_is_checked(host: ModuleType) -> None:
    seam = Row("fakehost:Engine", "seam", "the class", ">=0.30,<0.34")
    book = ledger(seam)
    with pytest.raises(MountError, match="must not be patched"):
        book.patch(seam.target, lambda original: original)
    book.note_seam(seam.target)
    assert book.states()[0].applied


def test_rows_that_were_not_applied_stop_the_worker(host: ModuleType) -> None:
    later = Row("fakehost:Engine.later", "patch", "a later host has it", ">=0.34")
    book = ledger(STEP, later)
    with pytest.raises(MountError, match=r"not mounted: fakehost:Engine\.step"):
        book.verify_applied(["core"])
    book.patch(STEP.target, lambda original: original)
    book.verify_applied(["core"])


@pytest.mark.parametrize("version", ["0.30.0", "0.33.0", "0.33.9", "0.33.0rc2.dev5", "0.33.0+cu129"])
def test_versions_inside_the_window(version: str) -> None:
    assert HostWindow("vllm", ">=0.30,<0.34").check(version) == base_release(version)


@pytest.mark.parametrize("version", ["0.29.3", "0.34.0", "0.1.dev1+gabc"])
def test_versions_outside_the_window_name_both(version: str) -> None:
    import re

    with pytest.raises(MountError, match=rf"found version {re.escape(version)}, accepted >=0\.30,<0\.34"):
        HostWindow("vllm", ">=0.30,<0.34").check(version)


def test_development_versions_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    window = HostWindow("vllm", ">=0.30,<0.34")
    with caplog.at_level(logging.WARNING, "baige_device"):
        window.check("0.32.1.dev7")
        window.check("0.32.1.dev7")
    assert [record.message for record in caplog.records] == [
        "vllm 0.32.1.dev7 is a development or local build; it is treated as 0.32.1"
    ]


def test_a_text_that_is_no_version_is_named() -> None:
    with pytest.raises(MountError, match="got 'unspecified'"):
        base_release("unspecified")


def test_a_host_that_is_not_installed() -> None:
    window = HostWindow("no-such-distribution", ">=1")
    assert window.installed() is None
    assert not window.row_applies(">=1")
    with pytest.raises(MountError, match="not installed"):
        window.check()
