"""Write the reference pages that come from the code: ops, settings, mounts. A test fails while they are stale.

python scripts/generate_docs.py [--check]
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from baige_device.engines.ledger import Ledger  # noqa: E402
from baige_device.ops import FAMILIES, contract  # noqa: E402
from baige_device.settings import env_name, settings_fields  # noqa: E402

_NOTE = "<!-- Written by scripts/generate_docs.py; edit the code instead. -->\n\n"
_FAMILY_TITLES = {"gather": "Gather", "weights": "Weights", "attention": "Attention", "moe": "Mixture of experts"}


def ops_page() -> str:
    """All contracts, from their docstrings."""
    parts = [
        _NOTE,
        "# Ops\n\nThe contracts, one by one. Letters: T tokens, B requests, K top-k, H query heads, G kv heads, ",
    ]
    parts.append("D head size, E experts, N ranks or page tokens.\n")
    for family, names in FAMILIES.items():
        parts.append(f"\n## {_FAMILY_TITLES[family]}\n")
        for name in names:
            op = contract(name)
            source = inspect.signature(op.signature)
            parts.append(f"\n### {name}\n\n```python\n{_signature(name, source)}\n```\n\n")
            parts.append(f"```text\n{inspect.cleandoc(op.signature.__doc__ or '')}\n```\n")
    return "".join(parts)


def _signature(name: str, signature: inspect.Signature) -> str:
    lines, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            lines.append("    *,")
        lines.append(f"    {parameter},")
    body = "\n".join(lines)
    return f"def {name}(\n{body}\n) -> {signature.return_annotation}".replace("'", "")


def settings_page() -> str:
    """Every setting with its default and meaning."""
    rows = [
        f"| `{name}` | `{env_name(name)}` | `{field.get_default(call_default_factory=True)!r}` | {field.description} |"
        for name, field in settings_fields().items()
    ]
    return (
        _NOTE + "# Settings\n\n"
        "Order: engine options beat environment variables, which beat the TOML file named by `BAIGE_CONFIG`. An "
        "unknown setting is an error that names the nearest known one. A dotted name is a field of a group: "
        '`[hisparse]` with `hot_tokens` in TOML, `{"hisparse": {"hot_tokens": 4096}}` as an engine option. Sources are '
        "merged field by field.\n\n"
        "| setting | environment | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n\n"
        "Two more variables are read outside these settings: `BAIGE_CONFIG` (path of the TOML file) and `BAIGE_CACHE` "
        "(where compiled CUDA kernels, development environments and the demo model are kept; by default "
        "`~/.cache/baige-device`; with neither it nor a home directory each process compiles kernels anew).\n\n"
        'In vLLM, engine options come from `--additional-config \'{"baige": {"checks": "none"}}\'`.\n'
    )


def mounts_page() -> str:
    """Both ledgers."""
    parts = [_NOTE, "# Engine mounts\n\nEverything that baige-device registers or patches in a host engine. "]
    parts.append("`seam`: the host's own extension API. `patch`: an attribute that is replaced.\n")
    for engine in ("vllm", "sglang"):
        ledger: Ledger = importlib.import_module(f"baige_device.engines.{engine}.ledger").LEDGER
        parts.append(f"\n## {engine} {ledger.window.accepted}\n\n")
        parts.append("| target | kind | feature | why | window | can go when |\n|---|---|---|---|---|---|\n")
        parts += [
            f"| `{row.target}` | {row.kind} | {row.feature} | {row.why} | `{row.window}` | {row.remove_when or '-'} |\n"
            for row in ledger.rows
        ]
    return "".join(parts)


PAGES = {"ops.md": ops_page, "settings.md": settings_page, "mounts.md": mounts_page}


def main() -> int:
    folder = ROOT / "docs" / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    stale = []
    for name, make in PAGES.items():
        path, text = folder / name, make()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale:
        print(("stale: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
