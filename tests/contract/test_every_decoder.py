"""Every decoder of the installed transformers gives the tokens of `generate`, or is refused."""

import msgspec
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton.protocol.errors import ConfigError
from tests.support.compute import Text, compute_config, greedy, loaded, logits
from tests.support.foreign_checkpoints import small_folder
from tests.support.oracle import Oracle, count_ties, prompt

NUM_TOKENS = 24


@pytest.mark.release
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_decoder_is_right_or_refused_in_one_line(kind: str) -> None:
    try:
        folder = small_folder(kind)
        expected = Oracle(folder).greedy(prompt(100), NUM_TOKENS)
    except Exception as error:  # noqa: BLE001  (any code of transformers)
        pytest.skip(f"no small model of {kind} generates: {type(error).__name__}")
    config = compute_config(folder)
    outcome = "equal"
    model = msgspec.structs.replace(config.model, model_impl="transformers")
    try:
        with loaded(msgspec.structs.replace(config, model=model)) as runner:
            text, other = Text("a", prompt(100), range(20)), Text("b", prompt(37, 1), range(20, 24))
            logits(runner, text.chunk(0, 64), other.chunk(0, 5))
            logits(runner, other.chunk(5, 37), text.chunk(64, 99))
            assert count_ties(expected, greedy(runner, text, NUM_TOKENS)) == 0
    except ConfigError as error:
        outcome = f"refused: {error.message}"
    assert "\n" not in outcome
    print(f"OUTCOME of {kind}: {outcome}")  # `pytest -rA` shows them
