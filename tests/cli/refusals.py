"""What a refused command says."""

import pytest

from lightning_gnnscale.cli.main import main


def refused(capsys, *words: str) -> str:
    """Run a command that must end with code 2 and one line; return the line."""
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert "Traceback" not in lines[0]
    return lines[0]
