"""Builds the operator library with tiles of 8 x 16 and runs small_tiles.py and small_chunks.py on it, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
EXACT = {"FWD_TILE_Q": 8, "FWD_TILE_KV": 16, "SPLIT_KV": 64, "BWD_TILE_Q": 8, "BWD_TILE_KV": 16, "BWD_CHUNK_ROWS": 6}
LINEAR = {"LINEAR_CHUNK": 8, "LINEAR_CHUNK_WIDE": 12, "LINEAR_CHUNK_FULL": 10, "LINEAR_SEGMENT": 16}


def run(command: list[str], **environment: str) -> None:
    done = subprocess.run(command, cwd=PROJECT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]


def test_every_edge_of_small_tiles(tmp_path):
    flags = " ".join(f"-D{name}={value}" for name, value in (EXACT | LINEAR).items())
    lib = tmp_path / "lib"
    folders = ["--build-base", str(tmp_path / "build"), "--build-lib", str(lib)]
    run([sys.executable, "setup.py", "-q", "build", *folders], CFLAGS=flags, CXXFLAGS=flags)
    library = lib / "tiled_attention" / "_cpu.abi3.so"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    run([*pytest, str(HERE / "small_tiles.py"), str(HERE / "small_chunks.py")], TILED_ATTENTION_LIBRARY=str(library))
