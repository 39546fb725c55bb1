"""What is typed in at a prompt, or run by ``exec``, is looked at as code in files is."""

from pathlib import Path

from tests.capture import test_reach, test_swapped

for _module in (test_reach, test_swapped):
    _names = {"__name__": "typed_in", "__package__": _module.__package__, "__file__": "<string>"}
    exec(compile(Path(_module.__file__).read_text(encoding="utf-8"), "<string>", "exec"), _names)
    globals().update({name: value for name, value in _names.items() if name.startswith("test_")})
