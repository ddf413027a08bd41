"""A cheap, stable fingerprint of a model's weights.

KV computed with other weights is wrong, and nothing in a prompt tells. So what a cache keeps on disk carries this
fingerprint. It depends on contents alone: a model that is copied elsewhere keeps it, one that is trained on and saved
over the same path does not.

Of each tensor some pieces are read, not all bytes. What changes only bytes that are not read is not noticed: that is
possible for an edit of single rows (a new token's embedding), not for training, which moves whole tensors.
`full=True` reads everything.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tiercache.errors import ConfigError

__all__ = ["NAME_IT", "resolve_model", "weights_fingerprint"]

NAME_IT = (
    'name model and weights yourself with kv_connector_extra_config {"namespace": "..."}, and change that name '
    "whenever the weights change"
)
"""The remedy wherever weights cannot be looked at."""

PIECE_NBYTES = 256
"""Bytes of a tensor that are read at each place."""
MIN_PIECES = 3
"""Places per tensor: first, middle, last."""
STRIDE_NBYTES = 16 << 20
"""Large tensors are read at more places, no further apart than this."""
OPAQUE_ENDS_NBYTES = 1 << 20
"""Of a file that is not safetensors, so much at either end (a torch file's directory with its CRCs is at the end)."""
OPAQUE_STRIDE_NBYTES = 1 << 20
MAX_HEADER_NBYTES = 100_000_000
"""The largest header that safetensors allows."""
THREADS = 8

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
"""Left behind by training; engines do not load them either."""
_NOT_LOADED = ("original", "checkpoint-")
"""Beginnings of names of folders beside the weights that engines do not load."""
_SETTINGS = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What decides how weights, images and sound become KV. Tokenizers do not: block hashes are over token ids."""
_PROVENANCE = ("_name_or_path", "transformers_version", "_commit_hash")
"""Keys in settings that say where a model came from, not what it computes."""


def weights_fingerprint(
    model_dir: str | os.PathLike[str],
    revision: str | None = None,
    *,
    cache_dir: str | None = None,
    full: bool = False,
) -> str:
    """What the weights of a model are, as text: `sample-1:<sha256>`, or `full-1:<sha256>`.

    `model_dir` is a folder, one file of weights, or the name of a model on a hub, of which the files in the local cache
    (`cache_dir`, or the hub client's own) at `revision` are taken; nothing is downloaded. Hashed are each file of
    weights in the folder and one folder below (safetensors: header, and pieces of every tensor; others: size, both
    ends, a piece per MiB), settings that decide what is computed (canonical JSON), and code that lies beside them.
    With `full` every byte of the weights. ConfigError where there are no weights or they cannot be read.
    """
    root = resolve_model(model_dir, revision, cache_dir=cache_dir)
    files = [root] if root.is_file() else list(_weight_files(root))
    if not files:
        raise ConfigError("model", str(model_dir), f"no file of weights is in {root}: {NAME_IT}")
    total = hashlib.sha256()
    try:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="tiercache-weights") as pool:
            digests = pool.map(_whole if full else _sampled, files)
            for path, digest in zip(files, digests, strict=True):
                name = "" if root.is_file() else path.relative_to(root).as_posix()
                total.update(json.dumps(["weights", name, digest]).encode())
        if not root.is_file():
            for name, digest in _beside(root):
                total.update(json.dumps(["beside", name, digest]).encode())
    except OSError as error:
        raise ConfigError("model", str(model_dir), f"its weights cannot be read ({error}): {NAME_IT}") from error
    return f"{'full' if full else 'sample'}-1:{total.hexdigest()}"


def resolve_model(model: str | os.PathLike[str], revision: str | None = None, *, cache_dir: str | None = None) -> Path:
    """The folder (or file) on this machine that holds a model, given by path or by its name on a hub.

    ConfigError where the hub's cache does not have it, or there is no hub client to ask. Downloads nothing.
    """
    path = Path(model)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError("model", str(model), f"no such folder, and no huggingface_hub to ask: {NAME_IT}") from None
    try:
        return Path(snapshot_download(str(model), revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (OSError, ValueError) as error:  # not in the cache; not a name that a hub could know
        raise ConfigError(
            "model", str(model), f"neither a folder nor in the hub's local cache ({type(error).__name__}): {NAME_IT}"
        ) from error


def _weight_files(root: Path) -> Iterator[Path]:
    """In order of their names: what lies in `root`, and in folders directly below that may be loaded too."""
    found = {
        path
        for pattern in _WEIGHTS
        for path in (*root.glob(pattern), *root.glob(f"*/{pattern}"))
        if path.name not in _NOT_WEIGHTS and path.is_file()
    }
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        if path.parent == root or not path.parent.name.startswith(_NOT_LOADED):
            yield path


def _beside(root: Path) -> Iterator[tuple[str, str]]:
    """Names and digests of settings and code."""
    for name in _SETTINGS:
        path = root / name
        if path.is_file():
            yield name, hashlib.sha256(_canonical(path.read_bytes())).hexdigest()
    for path in sorted(root.glob("*.py")):
        yield path.name, hashlib.sha256(path.read_bytes()).hexdigest()


def _canonical(text: bytes) -> bytes:
    """JSON without white space, order and provenance; what is not JSON stays as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if key not in _PROVENANCE}
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _whole(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled(path: Path) -> str:
    """Digest of a file's size, its header and the pieces of it that are read."""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        size = os.fstat(fd).st_size
        digest.update(size.to_bytes(8, "little"))
        header, spans = _safetensors_header(fd, size) if path.suffix == ".safetensors" else (b"", None)
        digest.update(header)
        for begin, nbytes in _opaque_pieces(size) if spans is None else _tensor_pieces(spans):
            digest.update(os.pread(fd, nbytes, begin))
    finally:
        os.close(fd)
    return digest.hexdigest()


def _safetensors_header(fd: int, size: int) -> tuple[bytes, list[tuple[int, int]] | None]:
    """The header's bytes, and where in the file each tensor lies (begin, end); None where it is no such file."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(size - 8, MAX_HEADER_NBYTES):
        return b"", None
    header = os.pread(fd, length, 8)
    try:
        entries: Any = json.loads(header)
        spans = [
            (8 + length + int(begin), 8 + length + int(end))
            for begin, end in (entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return b"", None
    return header, sorted(spans)


def _tensor_pieces(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Begin and size of what is read of tensors: small ones whole, of others pieces, evenly spread from end to end."""
    for begin, end in spans:
        count = max(MIN_PIECES, (end - begin) // STRIDE_NBYTES + 2)
        if end - begin <= count * PIECE_NBYTES:
            yield begin, max(end - begin, 0)
            continue
        reach = end - begin - PIECE_NBYTES
        for i in range(count):
            yield begin + reach * i // (count - 1), PIECE_NBYTES


def _opaque_pieces(size: int) -> Iterator[tuple[int, int]]:
    yield 0, min(size, OPAQUE_ENDS_NBYTES)
    for begin in range(OPAQUE_ENDS_NBYTES, size - OPAQUE_ENDS_NBYTES, OPAQUE_STRIDE_NBYTES):
        yield begin, PIECE_NBYTES
    if size > OPAQUE_ENDS_NBYTES:
        yield max(size - OPAQUE_ENDS_NBYTES, OPAQUE_ENDS_NBYTES), OPAQUE_ENDS_NBYTES
