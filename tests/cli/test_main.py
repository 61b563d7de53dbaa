"""The command where it ends quickly: as a user runs it, or in this process where nothing is left to a real one."""

import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import before_serving
from penstock.cli import main as command
from penstock.cli.main import main
from tests.cli.real_server import TINY_CONTEXT, write_tiny_model

pytestmark = pytest.mark.slow


def penstock(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_model_that_does_not_exist_is_one_clear_line() -> None:
    ended = penstock("serve", "nosuch", "--port", "0")
    assert ended.returncode == 1
    assert ended.stderr.startswith("penstock: there is no model 'nosuch'")
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_a_name_nearly_right_is_suggested() -> None:
    with pytest.raises(SystemExit, match=r"did you mean 'smollm2'\?"):
        main(["serve", "smolm2", "--port", "0"])


def test_a_port_in_use_is_one_clear_line_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = penstock("serve", "nosuch", "--port", str(port))
    assert ended.returncode == 1
    assert ended.stderr == f"penstock: cannot listen on 127.0.0.1 port {port}: Address already in use; try --port 0\n"


@pytest.mark.parametrize("replicas", [[], ["--replicas", "2"]], ids=["one", "two"])
def test_a_model_that_cannot_be_served_is_told_before_a_process_is_started(
    replicas: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(tmp_path)
    words = ["serve", str(tmp_path), "--load", "dummy", "--port", "0", *replicas]
    with pytest.raises(SystemExit, match=f"max_model_len is 99999, but the model's context ends at {TINY_CONTEXT}"):
        main([*words, "--max-model-len", "99999"])
    with pytest.raises(SystemExit, match="speculate is draft, but no model is named"):
        main([*words, "--speculate", "draft"])
    monkeypatch.setattr(before_serving, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"serving a model needs torch: pip install 'penstock\[engine\]'"):
        main(words)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["serve", "--port", "99999"], "server.port"),
        (["serve", "--dtype", "float3"], "argument --dtype: unknown choice 'float3'; did you mean 'float32'?"),
        (["serve", "--dtype", "xyz"], "unknown choice 'xyz'; choose from auto, float32, bfloat16, float16"),
        (
            ["serve", "--max-modl-len", "5"],
            "unknown flag --max-modl-len; did you mean --max-model-len?",
        ),
        (["serve", "--zzz=5"], "penstock serve: unknown flag --zzz\n"),
        (["serve", "smollm2", "nosuch"], "there is no model"),
        (["pull", "smollm2", "more"], "penstock pull: unexpected argument 'more'"),
        (["srve"], "penstock: unknown command 'srve'; did you mean 'serve'?"),
        (["bench", "serv"], "penstock bench: unknown command 'serv'; did you mean 'serve'?"),
        (["bench", "xyz"], "unknown command 'xyz'; choose from serve, saturation"),
        (["serve", "--host", "no.such.host.invalid"], "cannot listen"),
        (["pull", "nosuch"], "there is no model"),
        (["convert", "nosuch", "somewhere"], "there is no model"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr().err if ended.value.code == 2 else ended.value.code  # argparse writes, we hand on
    assert isinstance(told, str)
    assert complaint in told
    assert "Traceback" not in told
    assert told.count("\n") <= 2


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("penstock ")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"), "penstock: /x: No space left on device; free some"),
        (OSError(errno.EIO, os.strerror(errno.EIO), "/x"), "penstock: /x: Input/output error"),
        (ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)), "penstock: Connection reset by peer"),
    ],
)
def test_an_error_of_the_system_is_one_clear_line(error: OSError, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: object) -> None:
        raise error

    monkeypatch.setattr(command, "run", fail)
    with pytest.raises(SystemExit) as ended:
        main(["alerts", "list"])
    assert str(ended.value.code).startswith(said)
    assert "\n" not in str(ended.value.code)


def test_output_that_nobody_takes_is_one_line_or_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "plan", "--list-hardware"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "penstock: cannot write the output: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["convert", "smolm2", "x"], "there is no model 'smolm2'; did you mean 'smollm2'? Give a name"),
        (["convert", "org/name", "x"], "there is no model 'org/name'; did you mean 'hf:org/name'? Give a name"),
        (["convert", "nothing", "x"], "there is no model 'nothing'. Give a name"),
        (["plan", "llama8b", "--rate", "1", "--gpu", "rtx4090"], "no GPU 'rtx4090'. There are h200, "),
        (["plan", "llama8b", "--rate", "1", "--gpu", "h10"], "no GPU 'h10'; did you mean 'h100'? There are"),
    ],
)
def test_sentences_end_where_they_should(words: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert str(ended.value.code).startswith(f"penstock: {said}")


def test_help_begins_with_examples_and_the_ten_flags_people_use(capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in (("serve", 10), ("engine", 9)):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        text = capsys.readouterr().out
        head, _, rest = text.partition("most used:\n")
        assert f"\n  penstock {name} " in head
        assert "--" not in head.partition("positional arguments")[2]
        first = rest.partition("\n\n")[0]
        assert len(re.findall(r"^  --", first, re.MULTILINE)) == count
        assert max(map(len, head.splitlines())) <= 100
