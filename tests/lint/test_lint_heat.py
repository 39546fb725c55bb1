"""The linter knows which code runs once per step, and reports the rest more quietly or not at all."""

import textwrap

import pytest

from zdtrain.lint.finding import Severity
from zdtrain.lint.heat import Heat
from zdtrain.lint.linter import lint_source
from zdtrain.lint.settings import LintSettings

EVERYTHING = LintSettings(level=Severity.NOTE, select=("ZD1",))
HEADER = "import torch\nimport torch.nn.functional as F\nimport lightning as L\n"


def heats(source: str) -> dict[int, Heat]:
    """Line in `source` (from 1) -> how often the read on it runs."""
    text = HEADER + textwrap.dedent(source).lstrip("\n")
    return {finding.line - 3: finding.heat for finding in lint_source(text, settings=EVERYTHING)}


def test_the_body_of_a_training_loop_is_hot_and_what_follows_it_is_not() -> None:
    assert heats("""
        def train(model, loader, optimizer):
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                a = loss.item()
            b = loss.item()
        """) == {6: Heat.LOOP, 7: Heat.COLD}


def test_an_epoch_loop_around_the_batch_loop_is_not_hot() -> None:
    assert heats("""
        for epoch in range(10):
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            print(loss.item())
        """) == {6: Heat.RARE}


def test_a_loop_over_epochs_of_updates_does_not_make_the_outer_loop_hot() -> None:
    assert heats("""
        def main():
            for iteration in range(100):
                for epoch in range(4):
                    for start in range(0, 64, 8):
                        loss = agent(obs[start]).mean()
                        loss.backward()
                        optimizer.step()
                        a = loss.item()
                b = loss.item()
        """) == {8: Heat.LOOP, 9: Heat.RARE}


@pytest.mark.parametrize(
    "condition",
    [
        "step % 50 == 0",
        "not step % 50",
        "step == 0",
        "step % 50 == 49 and rank == 0",
        "step + 1 == len(loader)",
        "is_last_batch",
        "should_log(step)",
        "divisible_by(step, 50)",
        "step % 50 == 0 or step == 1",
        "time.time() - last_log > 60",
    ],
)
def test_a_read_under_an_interval_is_gated(condition: str) -> None:
    assert heats(f"""
        def train(model, loader, optimizer):
            for step, (x, y) in enumerate(loader):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                if {condition}:
                    a = loss.item()
        """) == {7: Heat.GATED}


@pytest.mark.parametrize(
    "condition",
    ["rank == 0", "writer is not None", "optimizer_idx == 0", "step > 100", "self.training", "args.verbose"],
)
def test_a_read_under_a_condition_that_usually_holds_stays_hot(condition: str) -> None:
    assert heats(f"""
        def train(model, loader, optimizer):
            for step, (x, y) in enumerate(loader):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                if {condition}:
                    a = loss.item()
        """) == {7: Heat.LOOP}


def test_a_variable_that_holds_an_interval_is_a_gate() -> None:
    assert heats("""
        def train(model, loader, optimizer):
            for step, (x, y) in enumerate(loader):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                flush = step % 50 == 0
                if flush:
                    a = loss.item()
        """) == {8: Heat.GATED}


def test_what_follows_a_continue_that_skips_most_steps_is_gated() -> None:
    assert heats("""
        def train(model, loader, optimizer):
            for step, (x, y) in enumerate(loader):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                if step % 50 != 0:
                    continue
                a = loss.item()
        """) == {8: Heat.GATED}


def test_the_optimizer_step_of_gradient_accumulation_is_not_an_interval() -> None:
    assert heats("""
        def train(model, loader, optimizer):
            for step, (x, y) in enumerate(loader):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                if (step + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    a = loss.item()
        """) == {8: Heat.LOOP}


def test_a_second_optimizer_now_and_then_is_an_interval() -> None:
    assert heats("""
        def train(generator, discriminator, loader, opt_g, opt_d):
            for i, x in enumerate(loader):
                loss = discriminator(x).mean()
                loss.backward()
                opt_d.step()
                if i % 5 == 0:
                    loss = generator(x).mean()
                    loss.backward()
                    opt_g.step()
                    a = loss.item()
        """) == {10: Heat.GATED}


def test_the_way_out_of_the_loop_is_rare() -> None:
    assert heats("""
        def train(model, loader, optimizer):
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                if stop:
                    a = loss.item()
                    break
        """) == {7: Heat.RARE}


def test_helpers_of_training_step_are_hot_and_those_of_validation_are_not() -> None:
    assert heats("""
        class Net(L.LightningModule):
            def training_step(self, batch, batch_idx):
                return self.shared(batch)

            def validation_step(self, batch, batch_idx):
                return self.score(batch)

            def shared(self, batch):
                loss = F.mse_loss(self.layer(batch[0]), batch[1])
                self.last = loss.item()
                return loss

            def score(self, batch):
                loss = F.mse_loss(self.layer(batch[0]), batch[1])
                return loss.item()
        """) == {10: Heat.STEP, 15: Heat.EVALUATION}


def test_helpers_are_followed_through_functions_bases_and_instances() -> None:
    assert heats("""
        def gap(a, b):
            return (a - b).abs().mean().item()

        class Base(L.LightningModule):
            def helper(self, x):
                return x.sum().item()

        class Penalty(torch.nn.Module):
            def forward(self, x):
                return x.norm().item()

        class Net(Base):
            def __init__(self):
                super().__init__()
                self.penalty = Penalty()

            def training_step(self, batch, batch_idx):
                x, y = batch
                return self.layer(x).mean() + gap(x, y) + self.helper(x) + self.penalty(x)
        """) == {2: Heat.STEP, 6: Heat.STEP, 10: Heat.STEP}


def test_a_helper_called_under_an_interval_only_is_gated() -> None:
    assert heats("""
        def report(loss):
            print(loss.item())

        def train(model, loader, optimizer):
            for step, (x, y) in enumerate(loader):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                if step % 100 == 0:
                    report(loss)
        """) == {2: Heat.GATED}


def test_a_function_that_takes_the_step_itself_is_hot() -> None:
    assert heats("""
        def one_update(model, optimizer, x, y):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()
        """) == {6: Heat.LOOP}


def test_a_docstring_or_comment_about_backward_makes_nothing_hot() -> None:
    assert heats('''
        def helper(loss):
            """Call ``loss.backward()`` first."""
            # loss.backward(); optimizer.step()
            return loss.item()
        ''') == {4: Heat.COLD}


def test_evaluation_functions_are_never_hot() -> None:
    assert heats("""
        def train(model, loader, optimizer):
            for step, (x, y) in enumerate(loader):
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                validate(model, loader)

        def validate(model, loader):
            for x, y in loader:
                total = F.mse_loss(model(x), y).item()
        """) == {9: Heat.EVALUATION}


def test_cold_reads_are_notes_and_hidden_by_default() -> None:
    source = HEADER + "def helper(loss):\n    return loss.item()\n"
    assert [finding.severity for finding in lint_source(source, settings=EVERYTHING)] == [Severity.NOTE]
    assert lint_source(source) == []


def test_environment_steps_make_a_rollout_loop_hot() -> None:
    assert heats("""
        def main():
            for episode in range(100):
                for t in range(200):
                    action = agent(obs)
                    obs, reward, done, info = env.step(action.cpu().numpy())
        """) == {5: Heat.LOOP}
