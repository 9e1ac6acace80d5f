"""What a model makes of a whole prompt instead of tokens, and which of these things it can make."""

from typing import Literal

import msgspec

from baton.protocol.ids import Count

# Of which rows of the last hidden state: the last one, the mean of all, the first one; or the
# numbers of the model's classifier, which it makes of the last one.
Pooling = Literal["last", "mean", "cls", "classify"]


class ModelTasks(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a model can be asked for, as its folder and the settings say."""

    generates: bool = True
    # How a prompt becomes an embedding; None: it does not.
    embedding: Pooling | None = None
    normalizes: bool = False  # embeddings have the length 1
    embedding_size: Count = 0  # numbers of an embedding; 0: unknown
    # Of the longest text to embed; 0: the model's length.
    max_embedded_tokens: Count = 0
    num_labels: Count = 0  # numbers of the classifier; 0: there is none
    # A score is the sigmoid of the classifier's only number.
    is_probability: bool = True
    # The classifier's number comes from the logits of tokens.
    scores_by_tokens: bool = False

    def can(self, pooling: Pooling | None) -> bool:
        if pooling is None:
            return self.generates
        if pooling == "classify":
            return self.num_labels > 0
        return pooling == self.embedding

    @property
    def described(self) -> str:
        """Return what it makes, as a phrase for people."""
        made = [
            *(["tokens"] if self.generates else []),
            *(["embeddings"] if self.embedding is not None else []),
            *(["scores"] if self.num_labels == 1 else []),
            *([f"numbers for {self.num_labels} labels"] if self.num_labels > 1 else []),
        ]
        return f"it makes {' and '.join(made)}"

    @property
    def pools(self) -> bool:
        """Return whether it makes anything but tokens."""
        return self.embedding is not None or self.num_labels > 0
