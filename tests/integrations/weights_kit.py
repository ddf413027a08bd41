"""Files of weights to look at: safetensors without the library of that name."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    entries, at = {}, 0
    for name, raw in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(tensors.values()))


def write_model(root: Path, seed: int = 0, *, layers: int = 3, nbytes: int = 5000, **config: object) -> Path:
    """A folder like that of a model: two files of random weights and a config.json."""
    root.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for part in range(2):
        tensors = {f"layers.{i}.{part}": rng.randbytes(nbytes) for i in range(layers)}
        write_safetensors(root / f"model-{part:05}.safetensors", tensors)
    (root / "config.json").write_text(json.dumps({"architectures": ["Tiny"], "rope_theta": 1e4, **config}))
    return root


def flip(path: Path, at: int) -> None:
    """Change one bit of the byte at `at` (from the end where negative)."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
