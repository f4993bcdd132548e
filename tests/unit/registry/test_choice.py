"""Which backend runs: user-demand cases A1 and A2."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from baige_device.errors import BackendError
from baige_device.registry import choice
from baige_device.registry.choice import choose, survey
from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.offers import Verdict
from tests.unit.registry.fakes import backend, source, with_reference


def test_machine_without_a_chip_gets_the_reference() -> None:
    chosen = choose("auto", with_reference(source("acme", backend(present=False))))
    assert chosen.backend.name == "reference"
    assert chosen.reason == "no accelerator is present"


def test_the_one_present_chip_wins() -> None:
    assert choose("auto", with_reference(source("acme", backend()))).backend.name == "acme"


def test_two_present_chips_are_an_error_naming_both_and_the_variable() -> None:
    fakes = with_reference(source("acme", backend(), "acme-dist 1.0"), source("zeta", backend(), "zeta-dist 2.0"))
    with pytest.raises(BackendError, match=r"'acme' \(acme-dist 1\.0\), 'zeta' \(zeta-dist 2\.0\); set BAIGE_BACKEND"):
        choose("auto", fakes)
    assert choose("zeta", fakes).backend.name == "zeta"


def test_naming_one_leaves_the_others_unimported() -> None:
    touched: list[str] = []

    def load() -> object:
        touched.append("other")
        return backend()

    other = source("other", None)
    other = type(other)(other.name, other.origin, load)
    choose("acme", with_reference(source("acme", backend()), other))
    assert touched == []


@pytest.mark.parametrize("name", ["", "acme ", "oof"])
def test_an_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(BackendError, match=f"expected one of auto, off, acme, reference, got '{name}'"):
        choose(name, with_reference(source("acme", backend())))


def test_failing_probe_with_hardware_present_stops_the_start() -> None:
    broken = backend(hardware=True, probe_error=ImportError("libfoo.so"))
    with pytest.raises(
        BackendError, match=r"'acme'.*its hardware is in this machine.*ImportError: libfoo\.so"
    ) as caught:
        choose("auto", with_reference(source("acme", broken)))
    assert isinstance(caught.value.__cause__, ImportError)


def test_failing_probe_without_hardware_is_one_debug_line(caplog: pytest.LogCaptureFixture) -> None:
    broken = backend(hardware=False, probe_error=ImportError("libfoo.so"))
    with caplog.at_level(logging.DEBUG, "baige_device"):
        assert choose("auto", with_reference(source("acme", broken))).backend.name == "reference"
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def _raising(error: BaseException) -> SimpleNamespace:
    """A chip whose device-node check raises."""

    @hookimpl
    def baige_hardware() -> Verdict:
        raise error

    plugin = backend()
    plugin.baige_hardware = baige_hardware
    return plugin


def _misspelt_argument() -> SimpleNamespace:
    plugin = backend()
    plugin.kv_write = hookimpl(lambda devise: None)
    return plugin


@pytest.mark.parametrize(
    ("plugins", "cause"),
    [
        ([ImportError("libfoo.so")], "ImportError: libfoo.so"),
        ([backend(), backend()], "two backends are named 'acme'"),
        ([backend(probe_error=OSError("two\nlines"))], "OSError: two lines"),
        ([_raising(RuntimeError("node"))], "RuntimeError: node"),
        ([_raising(SystemExit(3))], "baige_hardware raises SystemExit: 3"),
        ([_misspelt_argument()], "'devise'"),
    ],
    ids=["import", "twice", "probe", "hardware", "exit", "argument"],
)
def test_a_plugin_that_cannot_answer_is_warned_of_once_and_never_called_absent(
    plugins: list[object], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    choice._warn_once.cache_clear()
    fakes = with_reference(*(source("acme", plugin, "acme-dist 1.0") for plugin in plugins))
    with caplog.at_level(logging.WARNING, "baige_device"):
        chosen = choose("auto", fakes)
        choose("auto", fakes)
    assert chosen.backend.name == "reference"
    assert chosen.reason == "no chip is known to be present: acme could not answer"
    (line,) = [record.getMessage() for record in caplog.records]
    for part in ("backend 'acme'", "acme-dist 1.0", "cannot say whether its chip is here", cause):
        assert part in line
    with pytest.raises(BackendError, match="asked for by name"):
        choose("acme", fakes)


def test_failing_probe_of_a_named_backend_stops_the_start() -> None:
    broken = backend(hardware=False, probe_error=ImportError("libfoo.so"))
    with pytest.raises(BackendError, match="asked for by name"):
        choose("acme", with_reference(source("acme", broken)))


@pytest.mark.parametrize(
    ("name", "hardware", "hint"),
    [
        ("cuda", False, "; for its device nodes load the chip's driver, or give them to the container"),
        ("kunlun", False, "; for its device nodes load the chip's driver, or give them to the container"),
        ("cuda", True, "; `pip install 'baige-device[cuda]'` brings torch"),
        ("kunlun", True, ""),
        ("acme", False, ""),
    ],
)
def test_named_but_absent_chip_says_why_and_what_helps(
    monkeypatch: pytest.MonkeyPatch, name: str, hardware: bool, hint: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(BackendError) as caught:
        choose(name, with_reference(source(name, backend(present=False, hardware=hardware))))
    assert str(caught.value).endswith(f"is not usable: no fake chip{hint}")


def test_survey_shows_every_candidate_with_its_verdict() -> None:
    fakes = with_reference(
        source("acme", backend(present=False)),
        source("bad", backend(probe_error=OSError("boom"))),
        source("worse", ImportError("x")),
    )
    found = {item.backend.name: item for item in survey(fakes)}
    assert found["reference"].present
    assert not found["acme"].present
    assert str(found["bad"].error) == "boom"
    assert isinstance(found["worse"].error, ImportError)
