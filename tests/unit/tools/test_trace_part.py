"""Parts of traces: whole conversations at their times."""

import json

from tools.trace_part import main


def test_a_part_has_whole_conversations_in_their_order(tmp_path):
    # Every prompt begins with block 0. The second block names the conversation.
    rows = [
        {"timestamp": turn, "hash_ids": [0, 100 + chat, *range(turn)]}
        for turn in range(3)
        for chat in range(40)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    part = tmp_path / "part.jsonl"
    assert main([str(trace), str(part), "--one-of", "4"]) == 0
    taken = [json.loads(line) for line in part.read_text().splitlines()]
    chats = {row["hash_ids"][1] for row in taken}
    assert 0 < len(chats) < 40
    assert taken == [row for row in rows if row["hash_ids"][1] in chats]
