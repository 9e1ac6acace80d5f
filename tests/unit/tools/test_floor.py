"""Steps and their floors are measured on a tiny model, and every case gets a line."""

import pytest

from tests.support.checkpoints import model_folder
from tools import floor


def test_every_case_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder("qwen3", num_layers=2)
    words = ["--prompts", "40", "--batches", "2", "--contexts", "20"]
    assert floor.main([str(folder), *words, "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells] == ["step", "---", "prompt 40", "decode 2 x 20"]
    assert all(len(row) == len(cells[0]) for row in cells)
    assert all(float(value) > 0 for row in cells[2:] for value in row[1:7])
