"""The figures of the house are counted from the files."""

from pathlib import Path

import pytest

from tools.house import figures, imports_between, main


def test_lines_settings_and_imports_of_a_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol" / "__init__.py").write_text("")
    (tmp_path / "protocol" / "config.py").write_text(
        "class Config:\n"
        '    a: Annotated[int, Meta(ge=1, description="how many")] = 1\n'
        "    b: Annotated[int, Meta(ge=1)] = 1\n"
    )
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "core.py").write_text(
        "from baton.protocol.config import Config\nimport baton.router.text\n"
    )
    protocol = figures(tmp_path, "protocol")
    assert (protocol.lengths, protocol.settings) == ((3,), 1)
    assert imports_between(tmp_path) == {("router", "protocol"): 1}
    assert main([str(tmp_path)]) == 0
    assert "| shipped | 5 | 2 | 2 | 3 | 1 |" in capsys.readouterr().out
