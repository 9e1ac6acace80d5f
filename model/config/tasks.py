"""What a folder's model can be asked for besides tokens: embeddings, or a classifier's numbers.

Folders of sentence-transformers say it in modules.json. This module never imports torch.
"""

from pathlib import Path

import msgspec

from baton.model.config.decoder_config import DecoderConfig
from baton.model.config.reading import converted, read_json
from baton.model.config.transformers_config import AnyConfig
from baton.protocol.config import Convert
from baton.protocol.errors import ConfigError
from baton.protocol.ids import Count
from baton.protocol.pooling import ModelTasks, Pooling

MODULES = "modules.json"  # of sentence-transformers
# The names of sentence-transformers for its ways of pooling, now and before its version 6.
_POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_YES_NO = ("no", "yes")
# Chains of modules that are supported, by the last parts of their types.
_EMBEDDING = ["Transformer", "Pooling"]
_SCORE = ["Transformer", "LogitScore"]
_NORMALIZE = "Normalize"
_IDENTITY = "Identity"


class FolderTasks(msgspec.Struct, frozen=True):
    """What a model can be asked for, and the tokens whose logits its score is made of.

    A score is the logit of the first token without that of the second, if there is one.
    """

    tasks: ModelTasks = ModelTasks()
    label_token_ids: tuple[int, ...] = ()


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _Pooling(msgspec.Struct):
    pooling_mode: str | tuple[str, ...] | None = None


class _LogitScore(msgspec.Struct):
    true_token_id: Count
    false_token_id: Count | None = None


class _Transformer(msgspec.Struct):
    max_seq_length: Count | None = None
    do_lower_case: bool = False


class _Activation(msgspec.Struct, frozen=True):
    activation_fn: str = ""


class _Scores(msgspec.Struct):
    """The field of config.json that concerns scores."""

    sentence_transformers: _Activation = _Activation()


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: tuple[_AddedToken, ...] = ()


def read_tasks(folder: Path, decoder: AnyConfig, convert: Convert) -> FolderTasks:
    """Return what the model can be asked for. Raises `ConfigError` for other kinds of folders."""
    head = decoder.head if isinstance(decoder, DecoderConfig) else "tokens"
    size = decoder.hidden_size if isinstance(decoder, DecoderConfig) else 0
    tasks = ModelTasks(generates=head == "tokens", embedding_size=size)
    if convert == "none":
        if not tasks.generates:
            raise ConfigError(
                f"{folder}: model.convert is none, but the model makes no tokens"
            )
        return FolderTasks(tasks)
    if (folder / MODULES).is_file() and convert != "classify":
        return _of_modules(folder, decoder, tasks)
    names = decoder.label_names if isinstance(decoder, DecoderConfig) else ()
    if isinstance(decoder, DecoderConfig) and decoder.num_labels:
        scores = read_json(folder / "config.json", _Scores).sentence_transformers
        is_probability = _IDENTITY not in scores.activation_fn
        tasks = msgspec.structs.replace(
            tasks, num_labels=decoder.num_labels, is_probability=is_probability
        )
        return FolderTasks(tasks)
    if convert == "classify" or names:
        no, *yes = names or _YES_NO
        token_ids = tuple(_token_id(folder, name) for name in (*yes, no))
        return _of_tokens(folder, decoder, tasks, token_ids)
    if convert == "embed" or head == "none":
        return FolderTasks(
            msgspec.structs.replace(tasks, embedding="last", normalizes=True)
        )
    return FolderTasks(tasks)


def _of_modules(folder: Path, decoder: AnyConfig, tasks: ModelTasks) -> FolderTasks:
    file = folder / MODULES
    modules = read_json(file, list[_Module])
    names = [module.type.rpartition(".")[2] for module in modules]
    limits = _limits(folder)
    if names == _SCORE:
        score = read_json(folder / modules[1].path / "config.json", _LogitScore)
        ids = (score.true_token_id, score.false_token_id)
        return _of_tokens(
            folder, decoder, tasks, tuple(one for one in ids if one is not None)
        )
    if names not in (_EMBEDDING, [*_EMBEDDING, _NORMALIZE]):
        odd = [name for name in names if name not in (*_EMBEDDING, _NORMALIZE)] or names
        raise ConfigError(
            f"{file}: baton does not compute the module {odd[0]} in {', '.join(names)}; "
            "--convert none serves the model without embeddings"
        )
    pooling = _pooling(folder / modules[1].path / "config.json")
    tasks = msgspec.structs.replace(
        tasks,
        embedding=pooling,
        normalizes=_NORMALIZE in names,
        max_embedded_tokens=limits.max_seq_length or 0,
    )
    return FolderTasks(tasks)


def _limits(folder: Path) -> _Transformer:
    file = folder / "sentence_bert_config.json"
    if not file.is_file():
        return _Transformer()
    limits = read_json(file, _Transformer)
    if limits.do_lower_case:
        raise ConfigError(f"{file}: do_lower_case is not supported")
    return limits


def _pooling(file: Path) -> Pooling:
    fields = read_json(file, dict[str, object])
    chosen = converted(file, fields, _Pooling).pooling_mode
    if chosen is None:
        chosen = tuple(name for flag, name in _FLAGS.items() if fields.get(flag)) or (
            "mean",
        )
    names = (chosen,) if isinstance(chosen, str) else chosen
    if len(names) != 1 or names[0] not in _POOLINGS:
        known = ", ".join(_POOLINGS)
        raise ConfigError(
            f"{file}: baton does not pool by {' and '.join(names)}, only by {known}"
        )
    pooling = _POOLINGS[names[0]]
    if pooling != "last" and fields.get("include_prompt") is False:
        raise ConfigError(f"{file}: include_prompt false is not supported")
    return pooling


def _of_tokens(
    folder: Path, decoder: AnyConfig, tasks: ModelTasks, token_ids: tuple[int, ...]
) -> FolderTasks:
    """Return the tasks of a model whose score is made of the logits of these tokens."""
    if not isinstance(decoder, DecoderConfig) or decoder.head != "tokens":
        raise ConfigError(
            f"{folder}: only baton's own decoders with lm_head.weight make scores"
        )
    if not 1 <= len(token_ids) <= 2 or max(token_ids) >= decoder.vocab_size:
        raise ConfigError(
            f"{folder}: a score is computed from one or two tokens, not of {token_ids}"
        )
    return FolderTasks(
        msgspec.structs.replace(tasks, num_labels=1, scores_by_tokens=True), token_ids
    )


def _token_id(folder: Path, name: str) -> int:
    file = folder / "tokenizer.json"
    tokenizer = read_json(file, _Tokenizer)
    token_ids = {token.content: token.id for token in tokenizer.added_tokens}
    if tokenizer.model.vocab is not msgspec.UNSET:
        token_ids |= tokenizer.model.vocab
    if name not in token_ids:
        raise ConfigError(
            f"{file} has no token {name!r}, from which scores would be computed"
        )
    return token_ids[name]
