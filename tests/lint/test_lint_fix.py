"""``--fix`` changes what is certain and nothing else."""

from pathlib import Path

import pytest

from zdtrain.lint.cli import main

FIXABLE = [
    ("self.log('loss', loss.item())", "self.log('loss', loss)"),
    ("self.log('größe', loss.detach().mean().item())", "self.log('größe', loss.detach().mean())"),
    ("self.log('loss', float(loss), prog_bar=True)", "self.log('loss', loss, prog_bar=True)"),
    ("both = torch.cat([loss, other])", "both = torch.stack([loss, other])"),
    ("z = torch.where(torch.tensor(1), loss, other)", "z = torch.where(torch.tensor(True), loss, other)"),
]
SOURCE = """\
import torch
import torch.nn.functional as F
import lightning as L

class Net(L.LightningModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss, other = F.mse_loss(self.layer(x), y), F.l1_loss(self.layer(x), y)
        {line}
        return loss
"""


@pytest.mark.parametrize(("before", "after"), FIXABLE)
def test_a_certain_fix_is_applied_and_leaves_the_rest_alone(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_bytes(SOURCE.format(line=before).replace("\n", "\r\n").encode())
    main([str(path), "--isolated", "--fix"])
    assert path.read_bytes() == SOURCE.format(line=after).replace("\n", "\r\n").encode()


def test_fixing_twice_changes_nothing_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.py"
    path.write_text(SOURCE.format(line="self.log('loss', loss.item())"))
    assert main([str(path), "--isolated", "--fix"]) == 0
    assert "fixed 1 finding\n" in capsys.readouterr().err
    assert main([str(path), "--isolated", "--fix"]) == 0
    assert "fixed 0 findings\n" in capsys.readouterr().err


def test_two_fixes_on_one_line_are_both_applied(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(SOURCE.format(line="self.log('a', loss.item()); self.log('b', other.item())"))
    main([str(path), "--isolated", "--fix"])
    assert "self.log('a', loss); self.log('b', other)" in path.read_text()


def test_the_encoding_of_a_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    text = "# -*- coding: latin-1 -*-\n" + SOURCE.format(line="self.log('größe', loss.item())")
    path.write_bytes(text.encode("latin-1"))
    main([str(path), "--isolated", "--fix"])
    assert path.read_bytes() == text.replace("loss.item()", "loss").encode("latin-1")
