"""A trained model as a Hugging Face folder, which `AutoModelForCausalLM.from_pretrained` loads as it is.

    model.safetensors  config.json  generation_config.json    as transformers writes them
    tokenizer.json  tokenizer_config.json                     the run's own, or one in which each byte is its own token
    noloco.json                                               the run's signed manifest, round and losses
    README.md                                                 the same for people

Written under a temporary name beside the folder and then renamed, so a folder is complete; what a killed export left
there, the next one removes, or puts back where it is the export before. Only an earlier export is replaced, and only
one without other files in it.
"""

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

from noloco_node.base import atomic_files
from noloco_node.base.units import size
from noloco_node.errors import DiskFull, UsageError
from noloco_node.publish.evaluate import Measured
from noloco_node.publish.model_card import History, card
from noloco_node.publish.weights import Trained
from noloco_node.run import signed_file
from noloco_node.training.model import without_bars
from noloco_node.version import VERSION

_OURS = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("README.md", signed_file.NAME, "model.safetensors", "model.safetensors.index.json"),
}
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
"""Of weights that are too large for one file."""
_SPARE_BYTES = 64 << 20  # for everything but the weights
_ELSEWHERE = "name another place with --to"


def check(folder: Path) -> None:
    """Raises UsageError where an export would replace anything but an earlier export, or the working directory: whoever
    is in it would then be in a folder that is gone."""
    try:
        there = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise atomic_files.cannot_write(f"an export into {folder}", error, _ELSEWHERE) from error
    foreign = sorted(name for name in there if name not in _OURS and not _SHARD.fullmatch(name))
    if there and (foreign or signed_file.NAME not in there):
        what = foreign[0] if foreign else sorted(there)[0]
        raise UsageError(f"{folder} is not empty and not an export (it has {what}): name another folder with --to")
    if folder.samefile("."):
        raise UsageError(f"{folder} is the folder you are in, and an export replaces it: name another folder with --to")


def write(folder: Path, trained: Trained, measured: Measured | None, history: History) -> None:
    """Raises UsageError, DiskFull, and leaves the folder untouched then."""
    check(folder)
    folder = folder.resolve()  # a link to it stays one
    with atomic_files.writing(f"an export into {folder}", _ELSEWHERE):
        _settle(folder)
        fresh = atomic_files.part_of(folder)  # what a killed one left takes room, too
        _require_room(folder, trained)
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh.mkdir()
        try:
            _fill(fresh, trained, measured, history)
            _put_in_place(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)  # it is gone already where all went well


def _fill(into: Path, trained: Trained, measured: Measured | None, history: History) -> None:
    _write_model(into, trained)
    _write_tokenizer(into, trained)
    (into / signed_file.NAME).write_text(signed_file.text(trained.signed, _about(trained, measured)), encoding="utf-8")
    (into / "README.md").write_text(card(trained, measured, history), encoding="utf-8")
    for path in into.iterdir():
        path.chmod(0o644)  # others are to read it
    into.chmod(0o755)
    for path in (*into.iterdir(), into):
        atomic_files.sync(path)


def _put_in_place(fresh: Path, folder: Path) -> None:
    if _is_filled(folder):
        folder.rename(_earlier(folder))
    try:
        fresh.rename(folder)
    finally:
        _settle(folder)


def _settle(folder: Path) -> None:
    """The export before comes back where a later one ended before it took its place, and goes where it has."""
    earlier = _earlier(folder)
    if _is_filled(folder):
        shutil.rmtree(earlier, ignore_errors=True)
    elif earlier.exists():
        earlier.rename(folder)


def _is_filled(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


def _earlier(folder: Path) -> Path:
    """A name that `part_of` leaves alone."""
    return folder.with_name(f".{folder.name}.earlier.part")


def _write_model(into: Path, trained: Trained) -> None:
    from safetensors import SafetensorError
    from transformers import GenerationConfig

    module: Any = trained.module
    end = trained.tokenizer.end
    ends = {"bos_token_id": None, "eos_token_id": end}
    for name, value in ends.items():  # a config class has defaults for another tokenizer
        setattr(module.config.get_text_config(), name, value)
    # the config's stays: it would freeze a token where somebody trains on, but some models count positions by it
    module.generation_config = GenerationConfig(**ends, pad_token_id=end)
    try:
        with without_bars():
            module.save_pretrained(into)
    except SafetensorError as error:  # which has no number, only a text
        raise OSError(errno.ENOSPC if "No space left" in str(error) else errno.EIO, str(error)) from error


def _write_tokenizer(into: Path, trained: Trained) -> None:
    content = trained.tokenizer.file() or byte_tokenizer()
    (into / "tokenizer.json").write_bytes(content)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": trained.run.data.sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    (into / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def byte_tokenizer() -> bytes:
    """A tokenizer.json in which byte n is token n, so that decoding gives back every byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # a printable byte is its own letter, the others follow
    rest = iter(letter for letter in alphabet if letter >= "\u0100")
    letters = {chr(byte) if chr(byte) in alphabet else next(rest): byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return str(made.to_str(pretty=True)).encode()


def _about(trained: Trained, measured: Measured | None) -> dict[str, Any]:
    return {
        "version": VERSION,
        "round": trained.round,
        "step": trained.step,
        "states": [{"round": state.round, "step": state.step} for state in trained.states],
        "eval_loss": measured.loss if measured else None,
        "eval_tokens": measured.tokens if measured else None,
    }


def _require_room(folder: Path, trained: Trained) -> None:
    needed = sum(p.nbytes for p in trained.module.parameters()) + _SPARE_BYTES
    free = atomic_files.free_bytes(folder.absolute().parent)
    if free is not None and free < needed:
        raise DiskFull(
            f"the disk is full: an export needs {size(needed)} and {folder.parent} has {size(free)}. "
            f"Free some space, or {_ELSEWHERE}"
        )
