"""Small distributions made on the spot: plugins of others, backends from outside, host versions that do not exist."""

from __future__ import annotations

from pathlib import Path

__all__ = ["distribution", "host_tensor_backend"]

BACKEND = """
from baige_device.backends.reference import plugin as reference
from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.offers import Probe, Verdict


@hookimpl
def baige_hardware():
    return Verdict.yes("a card is in the slot") if {hardware} else Verdict.no("no card")


@hookimpl
def baige_probe():
    {probe}


for _op in ("attend_paged", "kv_write"):
    globals()[_op] = getattr(reference, _op)
"""
PRESENT = 'return Probe(True, "the card answers", "{torch_device}", "acme one")'
BROKEN = 'raise ImportError("libacme.so: cannot open shared object file")'


def distribution(
    folder: Path, name: str, version: str = "1.0", entry_points: str = "", modules: dict[str, str] | None = None
) -> str:
    """Write an installed distribution into a folder of its own below `folder`; returns the path for `sys.path`."""
    root = folder / f"site-{name}-{version}"
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, text in (modules or {}).items():
        (root / f"{module}.py").write_text(text)
    return str(root)


def host_tensor_backend(folder: Path, *, torch_device: str = "cpu", broken: bool = False, hardware: bool = True) -> str:
    """A backend `acme` from outside, whose probe finds a chip or raises; it offers the reference's dense attention."""
    probe = BROKEN if broken else PRESENT.format(torch_device=torch_device)
    return distribution(
        folder,
        f"acme-{torch_device}-{int(broken)}{int(hardware)}",
        entry_points="[baige_device.backends]\nacme = acme_plugin\n",
        modules={"acme_plugin": BACKEND.format(hardware=hardware, probe=probe)},
    )
