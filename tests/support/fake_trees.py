"""Folders that look like Megatron or torch to whoever asks for a version."""

from __future__ import annotations

from pathlib import Path


def lay_megatron(folder: Path, version: str) -> Path:
    """Put a Megatron without contents into a folder, as a tree beside a script lies; return its ``megatron/core``."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError('a version is read without an import')\n")
    (core / "package_info.py").write_text(f"__version__ = {version!r}\n")
    return core


def lay_torch(folder: Path, version: str) -> Path:
    """Put a torch without contents into a folder; return its own folder."""
    torch = folder / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('a version is read without an import')\n")
    (torch / "version.py").write_text(f"__version__ = {version!r}\n")
    return torch
