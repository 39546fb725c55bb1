"""`zdtrain report`: a page about one run, or several compared."""

from pathlib import Path

from zdtrain.cli import EXIT_OK
from zdtrain.errors import ConfigError
from zdtrain.parser import Parser
from zdtrain.records import RecordError, load_run
from zdtrain.report import render_page

MAX_RUNS = 6  # as many as there are colours to tell apart


def main(argv: list[str]) -> int:
    """Write the page, and a picture where one is asked for."""
    parser = Parser(prog="zdtrain report", description="Write a page about runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; several are compared")
    parser.add_argument("-o", "--output", help="the page (default: report.html in the first run folder)")
    parser.add_argument("--png", help="also draw the curves into this PNG file")
    options = parser.parse(argv)
    if len(options.runs) > MAX_RUNS:
        raise ConfigError(f"{len(options.runs)} runs: at most {MAX_RUNS} can be compared on one page")
    try:
        runs = [load_run(folder) for folder in options.runs]
    except RecordError as error:
        raise ConfigError(str(error)) from error
    if options.png and Path(options.png).suffix.lower() != ".png":
        raise ConfigError(f"--png {options.png}: give a file that ends in .png")
    page = Path(options.output or runs[0].folder / "report.html")
    try:
        page.write_text(
            render_page(runs), encoding="utf-8", errors="backslashreplace"
        )  # names of files may be any bytes
        print(page)
        if options.png:
            from zdtrain.report.png import save_png

            save_png(runs, options.png)
            print(options.png)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
    return EXIT_OK
