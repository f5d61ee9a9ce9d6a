"""The base model as it comes in: its files, its weights, its tokenizer, its limits. Weights are not read yet."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ajusta.base.errors import UserError
from ajusta.data.gguf_tokenizer import tokenizer_from_gguf
from ajusta.data.tokenizer import end_token_ids, load_tokenizer
from ajusta.engine.weights import GgufSource, WeightSource, open_weights, with_storages
from ajusta.spec.config import Config
from ajusta.stages.fetch import fetch

_LIMITS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
_NO_LIMIT = ("bloom", "mpt")  # ALiBi: positions are distances, no table ends


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model that a run starts from."""

    reference: str
    revision: str | None
    source: WeightSource
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: tuple[int, ...]
    position_limit: int | None  # tokens; None where the model has no table of positions

    @property
    def config(self) -> PretrainedConfig:
        """Transformers' configuration."""
        return self.source.config


def open_base(config: Config) -> Base:
    """Find the model, fetch it if it is a hub name, open its weights and its tokenizer.

    Raises:
        UserError: there is no such model, or it cannot be used; one line says why.
    """
    fetched = fetch(config.model, config.revision, offline=config.offline, allow_code=config.trust_remote_code)
    source = open_weights(fetched.path, trust_remote_code=config.trust_remote_code, reference=fetched.reference)
    if isinstance(source, GgufSource):
        tokenizer: PreTrainedTokenizerBase = tokenizer_from_gguf(source.metadata, str(fetched.path))
    else:
        tokenizer = load_tokenizer(fetched.path)
    return Base(
        reference=fetched.reference,
        revision=fetched.revision,
        source=source,
        tokenizer=tokenizer,
        end_token_ids=end_token_ids(tokenizer, source.generation),
        position_limit=position_limit(source.config),
    )


def as_stored(config: Config, reference: str, source: WeightSource | None) -> Config:
    """Return the settings with the bits in which a checkpoint holds its weights, where it holds them quantized.

    `bits: none` is "as it is", so there it means those bits too.

    Raises:
        UserError: other bits are asked for: the weights would be rounded twice.
    """
    quantized = with_storages(source)
    if quantized is None:
        return config
    kinds = sorted(set(quantized.kinds.values()))
    if len(kinds) > 1 or config.bits not in ("none", kinds[0]):
        raise UserError(
            f"{reference} is already quantized to {' and '.join(kinds)}, and bits is {config.bits}; expected "
            f"its own bits, or none, which keeps it as it is; leave --bits out, or choose the model's plain version"
        )
    return config.model_copy(update={"bits": kinds[0]})


def position_limit(config: PretrainedConfig) -> int | None:
    """Return how many positions a model knows, in tokens; None where no table of positions ends."""
    text = config.get_text_config()
    if text.model_type in _NO_LIMIT:
        return None
    values = [getattr(text, name, None) for name in _LIMITS]
    return next((value for value in values if isinstance(value, int) and value > 0), None)
