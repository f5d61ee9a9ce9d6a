"""A model folder's tokenizer: loaded from local files only, written so that every reader finds its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ajusta.base.errors import ModelError

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder; nothing is fetched and no code of the folder is run.

    Raises:
        ModelError: there is no tokenizer, or its files cannot be read or do not belong together.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; expected one with tokenizer.json; check the path")
    there = sorted(entry.name for entry in folder.iterdir() if "token" in entry.name or "vocab" in entry.name)
    if not there:
        raise ModelError(f"{folder} has no tokenizer file; expected tokenizer.json; fetch the model again")
    _check_tokenizer_json(folder / "tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{folder} has a tokenizer that cannot be loaded ({first[:200]}); it holds {', '.join(there)}; expected "
            f"tokenizer.json and {CONFIG_FILE} of one model; fetch them again"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or len(tokenizer) == 0:
        raise ModelError(f"{folder} gives an empty tokenizer (it holds {', '.join(there)}); expected tokenizer.json")
    return tokenizer


def end_token_ids(tokenizer: PreTrainedTokenizerBase, generation: Mapping[str, object]) -> tuple[int, ...]:
    """Return every token id that ends an answer: generation_config's own (one or a list), then the tokenizer's.

    Args:
        tokenizer: its `eos_token_id` is added at the end where it is not yet among them.
        generation: the values of generation_config.json (`WeightSource.generation`).

    Raises:
        ModelError: neither names an end token, or one is out of the vocabulary.
    """
    given = generation.get("eos_token_id")
    listed = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    own = tokenizer.eos_token_id
    ids: list[int] = []
    for value in (*listed, *([] if own is None else [own])):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokenizer):
            raise ModelError(
                f"generation_config names the end token {value!r}; expected ids of the vocabulary (0 to "
                f"{len(tokenizer) - 1}); repair eos_token_id"
            )
        if value not in ids:
            ids.append(value)
    if not ids:
        raise ModelError(
            "neither generation_config nor the tokenizer names an end token; set eos_token_id in one of them"
        )
    return tuple(ids)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; the chat template goes to both places that readers look in.

    transformers 5 reads chat_template.jinja; older releases, llama.cpp's converter and most servers read the key
    `chat_template` of tokenizer_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    template = tokenizer.chat_template
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(template, str):
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        config["chat_template"] = template
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the same class, by transformers 4's name
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_tokenizer_json(path: Path) -> None:
    """Refuse a broken file here: the tokenizers library raises a bare Exception for it, which must not be caught."""
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable as JSON ({error}); expected a whole file; fetch it again") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ModelError(
            f"{path} has no tokenizer model in it; expected the file that came with the model; fetch it again"
        )
    model = content["model"]
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocabulary, dict) and isinstance(merges, list):
        for merge in merges:
            pair = merge if isinstance(merge, list) else str(merge).split(" ", 1)
            if any(part not in vocabulary for part in pair):
                raise ModelError(f"{path}: the merge {merge!r} is of no token in the vocabulary; fetch it again")
