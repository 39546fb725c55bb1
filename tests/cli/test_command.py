import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import zdtrain.cli.training  # noqa: F401 - importing lightning leaves environment variables behind, once
from zdtrain.cli import COMMANDS, main
from zdtrain.records import find_runs, load_run

CONFIG = {
    "seed_everything": 1,
    "trainer": {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
    "model": {"class_path": "cli_models.Seen"},
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*found in sys.modules"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the model and a config file."""
    (tmp_path / "cli_models.py").write_text((Path(__file__).parent / "models.py").read_text())
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cli_models", raising=False)
    return tmp_path


def seen():
    return json.loads(Path("seen.json").read_text())


def error_of(capsys):
    """The error message, after checking that it is one line."""
    lines = capsys.readouterr().err.splitlines()
    (message,) = [line for line in lines if line.startswith("zdtrain: error: ")]
    assert lines[-1] == message
    return message


def test_fit_trains_and_says_the_metrics_and_the_run_folder(here, capsys):
    assert main(["fit", "base.yaml"]) == 0
    (folder,) = find_runs("runs")
    out = capsys.readouterr().out
    assert "\nval " in out
    assert f"run folder: {folder}" in out
    assert folder.name.endswith("-base")
    assert load_run(folder).steps == [0, 1, 2, 3]


def test_every_number_in_scientific_notation_is_a_number(here):
    Path("numbers.yaml").write_text(
        "model: {init_args: {lr: 1e-4, wd: 1E-2, count: 1e1, sched: [1e-3, 1.0e-3, 2], "
        "extra: {lr: 1e-4, list: [1e-3, {x: 2E-2}], name: abc}}}"
    )
    assert main(["fit", "base.yaml", "numbers.yaml", "--trainer.max_steps=1e0"]) == 0
    assert seen() == {
        "lr": 1e-4,
        "wd": 1e-2,
        "count": 10,
        "sched": [1e-3, 1e-3, 2.0],
        "extra": {"lr": 1e-4, "list": [1e-3, {"x": 2e-2}], "name": "abc"},
    }
    assert type(seen()["count"]) is int


@pytest.mark.parametrize(
    ("flag", "key", "value"),
    [
        ("--model.init_args.lr=3e-5", "lr", 3e-5),
        ("--model.lr=3e-5", "lr", 3e-5),
        ("--model.extra.lr=3e-5", "extra", {"lr": 3e-5}),
        ("--model.extra={a: [1e-3]}", "extra", {"a": [1e-3]}),
        ("--model.count=1e2", "count", 100),
        ("--model.sched=[1e-3, 2]", "sched", [1e-3, 2.0]),
    ],
)
def test_numbers_on_the_command_line_are_numbers(here, flag, key, value):
    assert main(["fit", "base.yaml", flag, "--trainer.fast_dev_run=true"]) == 0
    assert seen()[key] == value


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--trainer.capture=grap", "trainer.capture: expected one of 'auto', 'off', 'graph', 'compile', got 'grap'"),
        ("--trainer.nonfinite=skp", "did you mean 'skip'?"),
        ("--trainer.precision=bf16-mixd", "did you mean 'bf16-mixed'?"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_the_choices_and_the_nearest(here, capsys, flag, message):
    assert main(["fit", "base.yaml", flag]) == 2
    assert message in capsys.readouterr().err


def test_an_untyped_whole_number_stays_a_float(here):
    assert main(["fit", "base.yaml", "--model.extra={x: 1e3}", "--trainer.fast_dev_run=true"]) == 0
    assert type(seen()["extra"]["x"]) is float


@pytest.mark.parametrize(
    "argv",
    [
        ["base.yaml", "more.yaml", "--model.lr", "0.5"],
        ["--model.lr", "0.5", "base.yaml", "more.yaml"],
        ["--config=base.yaml", "--model.lr=0.5", "--config", "more.yaml"],
        ["-c", "base.yaml", "--model.lr=0.5", "more.yaml"],
    ],
)
def test_files_merge_the_last_wins_and_flags_beat_files_wherever_they_stand(here, argv):
    Path("more.yaml").write_text("model: {init_args: {lr: 0.25, wd: 0.125}}")
    assert main(["fit", *argv, "--trainer.fast_dev_run=true"]) == 0
    assert (seen()["lr"], seen()["wd"]) == (0.5, 0.125)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["base.yaml", "--trainer.max_epoch=3"],
            "unknown option 'trainer.max_epoch'; did you mean 'trainer.max_epochs'",
        ),
        (
            ["base.yaml", "--trainr.max_epochs=3"],
            "unknown option 'trainr.max_epochs'; did you mean 'trainer.max_epochs'",
        ),
        (["base.yaml", "--model.lrr=3"], "cli_models.Seen has no option 'lrr'; did you mean 'lr'?"),
        (["base.yaml", "--model.lr=x"], "model.lr: expected float, got 'x'"),
        (["base.yaml", "--trainer.max_epochs=few"], "trainer.max_epochs: expected int or null, got 'few'"),
        (["base.yaml", "--trainer.max_epochs=1.5"], "trainer.max_epochs: expected int or null, got '1.5'"),
        (["base.yaml", "--trainer.accelerator=abacus"], "accelerator='abacus'"),
        (["base.yaml", "--trainer.lightning_quirks=3"], "trainer.lightning_quirks"),
        (["base.yaml", "--model.fail=init"], "width 3 is not a multiple of 2"),
        (["base.yaml", "bad1.yaml"], "no 'Sen' in cli_models; did you mean 'Seen'?"),
        (["base.yaml", "bad2.yaml"], "no class 'EarlyStoping'; did you mean 'EarlyStopping'?"),
        (["base.yaml", "bad3.yaml"], "EarlyStopping has no option 'monitr'; did you mean 'monitor'?"),
        (["base.yaml", "bad4.yaml"], "unknown option 'trainer.max_epoch'; did you mean 'trainer.max_epochs'?"),
        (["base.yaml", "bad5.yaml"], "unknown key 'init_arg' beside class_path; did you mean 'init_args'?"),
        (["base.yaml", "bad6.yaml"], "Problems parsing config"),
        (["base.yaml", "bad7.yaml"], "no 'Threshold' in zdtrain.monitor; did you mean 'zdtrain.monitors.Threshold'?"),
        (["base.yaml", "bad8.yaml"], "trainer.monitors.metric: expected str or list, got '3'"),
        (["base.yaml", "bad9.yaml"], "no class 'Treshold'; did you mean 'Threshold'?"),
        (["base.yaml", "bad10.yaml"], "zdtrain.monitors.Plateau has no option 'sigma'; it has: metric, patience, "),
        (["base.yaml", "--trainer.monitors=3"], "trainer.monitors: expected list or null, got '3'"),
        (["base.yaml", "--model=nowhere.Net"], "no module 'nowhere'"),
        (["base.yaml", "--data=cli_models.Seen"], "data: expected a LightningDataModule, got 'cli_models.Seen'"),
        (["base.yaml", "-x"], "unknown option '-x'"),
        (["base.yaml", "--ckpt_path=bas.yaml"], "ckpt_path: no file bas.yaml; did you mean 'base.yaml'?"),
        (["base.yaml", "--ckpt_path=base.yaml"], "ckpt_path base.yaml cannot be read: UnpicklingError"),
        (["."], "config file is no file: "),
        (["none.yaml"], "config file does not exist: "),
        (["base.yaml", "trainer.max_epochs=3"], "options start with dashes"),
        ([], "missing: model"),
    ],
)
def test_a_bad_configuration_fails_in_one_line_that_names_the_remedy(here, capsys, argv, message):
    bad = [
        "model: {class_path: cli_models.Sen}",
        "trainer: {callbacks: [{class_path: EarlyStoping, init_args: {monitor: x}}]}",
        "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitr: x}}]}",
        "trainer: {max_epoch: 3}",
        "model: {class_path: cli_models.Seen, init_arg: {lr: 1}}",
        "model: {class_path: [",
        "trainer: {monitors: [{class_path: zdtrain.monitor.Threshold, init_args: {metric: x, above: 1}}]}",
        "trainer: {monitors: [{class_path: zdtrain.monitors.NonFinite, init_args: {metric: 3}}]}",
        "trainer: {monitors: [{class_path: Treshold, init_args: {metric: x, above: 1}}]}",
        "trainer: {monitors: [{class_path: zdtrain.monitors.Plateau, init_args: {metric: x, sigma: 1}}]}",
    ]
    for number, text in enumerate(bad, start=1):
        Path(f"bad{number}.yaml").write_text(text)
    assert main(["fit", *argv]) == 2
    assert message in error_of(capsys)
    assert not Path("runs").exists()


def test_a_training_error_is_one_line_that_points_to_the_traceback(here, capsys):
    assert main(["fit", "base.yaml", "--model.fail=step"]) == 1
    (folder,) = find_runs("runs")
    assert f"RuntimeError: the step went wrong (traceback in {folder / 'events.jsonl'})" in error_of(capsys)


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupted_run_says_so_and_keeps_its_rows(here, signal, code):
    fit = ["fit", "base.yaml", f"--model.fail={signal}"]
    # where tests run in the background of a shell, processes ignore Ctrl-C
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{listens}; import zdtrain.cli; raise SystemExit(zdtrain.cli.main())", *fit]
    assert subprocess.run(command, capture_output=True, timeout=100, check=False).returncode == code
    (folder,) = find_runs("runs")
    run = load_run(folder)
    assert run.steps
    assert run.summary["status"] == ("interrupted" if signal == "SIGINT" else "failed")


def test_print_config_shows_the_merged_configuration_and_trains_nothing(here, capsys):
    assert main(["fit", "--print_config", "base.yaml", "--trainer.max_epochs=7"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["max_epochs"] == 7
    assert printed["model"]["class_path"] == "cli_models.Seen"
    assert not Path("runs").exists()


def test_a_run_is_reproduced_from_the_config_in_its_folder(here):
    Path("random.yaml").write_text("seed_everything: true")
    assert main(["fit", "base.yaml", "random.yaml", "--name=first", "--trainer.max_epochs=2"]) == 0
    (first,) = find_runs("runs")
    assert main(["fit", str(first / "config.yaml")]) == 0
    one, two = (load_run(folder) for folder in find_runs("runs"))
    assert one.metrics == two.metrics
    assert len(one.steps) == 8
    assert "-first" in two.name


def test_resuming_continues_the_run_folder(here):
    flags = ["base.yaml", "--trainer.enable_checkpointing=true"]
    assert main(["fit", *flags]) == 0
    (folder,) = find_runs("runs")
    (checkpoint,) = (folder / "checkpoints").glob("*.ckpt")
    assert main(["fit", *flags, "--trainer.max_epochs=3", "--ckpt_path", str(checkpoint)]) == 0
    assert find_runs("runs") == [folder]
    assert load_run(folder).steps == list(range(12))
    assert (folder / "config-2.yaml").is_file()


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_other_stages_run(here, command):
    assert main([command, "base.yaml"]) == 0
    assert len(find_runs("runs")) == 1


def test_a_folder_that_another_process_records_into_is_refused_in_one_line(here, capsys):
    assert main(["fit", "base.yaml"]) == 0
    (folder,) = find_runs("runs")
    code = (
        "import sys, time; from pathlib import Path; from zdtrain.records.writer import RunWriter; "
        "RunWriter(Path(sys.argv[1])).event('held'); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        capsys.readouterr()
        assert main(["fit", "base.yaml", f"--trainer.records={folder}"]) == 1
        holder.kill()
    said = capsys.readouterr().err
    assert "zdtrain: error: another process is recording into" in said
    assert "Traceback" not in said


def test_warnings_of_ours_are_one_line_each(here):
    command = [sys.executable, "-m", "zdtrain", "fit", "base.yaml", "--trainer.records=base.yaml"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stderr
    (line,) = [line for line in said.splitlines() if "run folder" in line]
    assert line.startswith("zdtrain: warning: cannot make a run folder in base.yaml: Not a directory. Training goes on")


def test_records_can_be_turned_off(here):
    assert main(["fit", "base.yaml", "--trainer.records=false"]) == 0
    assert not Path("runs").exists()
    assert not Path("config.yaml").exists()


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--help"], 0, "usage: zdtrain COMMAND"),
        ([], 2, "usage: zdtrain COMMAND"),
        (["--version"], 0, "zdtrain 0.1"),
        (["fti"], 2, "unknown command 'fti'; did you mean 'fit'?"),
    ],
)
def test_the_bare_command_explains_itself(capsys, argv, code, text):
    assert main(argv) == code
    captured = capsys.readouterr()
    assert text in captured.out + captured.err


def test_every_command_can_be_loaded():
    for command in COMMANDS.values():
        assert callable(command.load())


def test_the_command_line_itself_loads_neither_torch_nor_lightning():
    code = "import sys, zdtrain.cli; zdtrain.cli.main(['--help']); assert not {'torch', 'lightning'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_listing_runs_loads_neither_torch_nor_lightning():
    code = "import sys, zdtrain.cli.runs; assert not {'torch', 'lightning'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("variable", "flags", "capture"),
    [
        (None, ["--trainer.capture", "graph"], "graph"),
        ("graph", [], "graph"),
        ("off", ["--trainer.capture=graph"], None),
        (None, [], None),
    ],
)
def test_capture_is_chosen_by_a_flag_or_by_the_environment_which_wins(here, monkeypatch, variable, flags, capture):
    monkeypatch.delenv("ZDTRAIN_CAPTURE", raising=False)
    if variable is not None:
        monkeypatch.setenv("ZDTRAIN_CAPTURE", variable)
    assert main(["fit", "base.yaml", *flags]) == 0
    (folder,) = find_runs("runs")
    assert load_run(folder).summary.get("capture") == capture


def test_a_capture_that_does_not_exist_is_refused_by_name(here, capsys, monkeypatch):
    assert main(["fit", "base.yaml", "--trainer.capture", "grap"]) == 2
    assert error_of(capsys) == (
        "zdtrain: error: trainer.capture: expected one of 'auto', 'off', 'graph', 'compile', got 'grap'; "
        "did you mean 'graph'?"
    )
    monkeypatch.setenv("ZDTRAIN_CAPTURE", "grap")
    assert main(["fit", "base.yaml"]) != 0
    assert "ZDTRAIN_CAPTURE='grap': use one of" in error_of(capsys)
