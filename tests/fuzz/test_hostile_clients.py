"""Whatever clients send, others are served as before, and the router stays small and sound."""

import os
import random
from pathlib import Path

import pytest

from baton.protocol.config import ClusterConfig, LogConfig, ModelConfig, RouterConfig
from tests.fuzz.fuzzer import fuzz
from tests.support.small_tokenizers import write_tokenizer

NUM_VOLLEYS = 150
LIMIT_S = 300.0
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CHAT += "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"


def besieged(folder: Path) -> ClusterConfig:
    path = write_tokenizer(folder / "tiny")
    (folder / "tiny" / "chat_template.jinja").write_text(CHAT)
    return ClusterConfig(
        model=ModelConfig(path=path, served_model_name="tiny"),
        router=RouterConfig(
            port=0, control=f"ipc://{folder}/control", local_prefill="never"
        ),
        log=LogConfig(stats_s=0.0),
    )


@pytest.mark.release
@pytest.mark.timeout(900)
def test_no_attack_holds_the_router_up_or_fills_it(tmp_path):
    seed = int(os.environ.get("BATON_FUZZ_SEED") or random.randrange(1 << 32))
    print(f"BATON_FUZZ_SEED={seed} replays this")
    findings = fuzz(besieged(tmp_path), seed, range(NUM_VOLLEYS), LIMIT_S)
    print(findings)
    assert not findings.problems
