"""Which backend runs: user-demand cases A1 and A2."""

from __future__ import annotations

import logging

import pytest

from baige_device.errors import BackendError
from baige_device.registry.choice import choose, survey
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


@pytest.mark.parametrize("name", ["", "acme "])
def test_an_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(BackendError, match="expected one of acme, reference"):
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


def test_failing_probe_of_a_named_backend_stops_the_start() -> None:
    broken = backend(hardware=False, probe_error=ImportError("libfoo.so"))
    with pytest.raises(BackendError, match="asked for by name"):
        choose("acme", with_reference(source("acme", broken)))


def test_named_but_absent_chip_says_why_and_how_to_install() -> None:
    with pytest.raises(
        BackendError, match=r"not usable: no fake chip; install it with `pip install 'baige-device\[cuda\]'`"
    ):
        choose("cuda", with_reference(source("cuda", backend(present=False))))


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
