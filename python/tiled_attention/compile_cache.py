"""What torch.compile keeps on disk is keyed by this library as well as by torch.

The key of a compiled graph has the names of the operators in it, torch's sources and torch's settings, and nothing of the library that
defines the operators. Their shapes, their derivatives and what stands in their place in the compiled graph come from here, so that another
version would be handed what this one compiled. `torch.compiler.config.cache_key_tag` is what torch lets others add to every key.
"""

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config


def key_of(folder: Path, version: str) -> str:
    """The version and a hash of the Python modules in `folder`: two checkouts of one version differ, two installs of one wheel do not."""
    digest = hashlib.sha256(version.encode())
    for module in sorted(folder.rglob("*.py")):
        digest.update(f"\0{module.relative_to(folder).as_posix()}\0".encode())
        digest.update(module.read_bytes())
    return f"tiled-attention-{version}-{digest.hexdigest()[:16]}"


@functools.cache
def key() -> str:
    """What this library adds to the key of every compiled graph."""
    try:
        version = importlib.metadata.version("tiled-attention")
    except importlib.metadata.PackageNotFoundError:
        version = "uninstalled"
    return key_of(Path(__file__).parent, version)


def key_caches() -> None:
    """Adds `key` to torch's tag, behind what is there. Every thread that compiles needs it: torch keeps such settings by thread."""
    tag = torch.compiler.config.cache_key_tag
    if key() not in tag:
        torch.compiler.config.cache_key_tag = f"{tag}+{key()}" if tag else key()


def register_fake(name: str, rule: Callable[..., Any]) -> None:
    """torch.library.register_fake of one of our operators. The rule runs when a graph is traced, which is before its key is made."""

    @functools.wraps(rule)
    def keyed(*args: Any, **named: Any) -> Any:
        key_caches()
        return rule(*args, **named)

    torch.library.register_fake(f"tiled_attention::{name}", keyed)


key_caches()
