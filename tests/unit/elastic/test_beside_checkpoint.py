"""What a run that is restarted without a hand keeps beside its checkpoint, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.rules.import_rules import ROOT
from tests.support.pace import pace
from tests.support.pool import free_port
from vtp_plugin.checkpoint.save.saving import FolderLock
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.flag import format_value
from vtp_plugin.elastic.cards import RankCard
from vtp_plugin.elastic.coordinator import Coordinator
from vtp_plugin.elastic.failed_cards import (
    CARD_VARIABLE,
    forget_error,
    leave_out,
    name_card,
    note_error,
    note_for_next_start,
    reported_error,
)
from vtp_plugin.elastic.progress import (
    FAILED_STARTS,
    MARKER,
    MOST_EQUAL,
    PROGRESS,
    RUN_FOLDER_VARIABLE,
    START_VARIABLE,
    LastStep,
    Progress,
    forget_failed_starts,
    hand_on,
    leave_marker,
    name_start,
    note_end,
    read_last,
    require_unmarked,
    write_last,
)
from vtp_plugin.errors import ConfigError, LayoutError, PeerError, ShortageError


def cards(*why: str) -> list[RankCard]:
    return [
        RankCard(node="b", local_rank=number, site="", kind="cpu", why=text, versions="1")
        for number, text in enumerate(why)
    ]


def reporting(found: list[RankCard], folder: Path) -> list[RankCard]:
    """Give cards as their ranks post them, with what they have reported into the folder of their site."""
    posted = [replace(card, reported=reported_error(folder, name_card(card))) for card in found]
    for card in found:
        forget_error(folder, name_card(card))
    return posted


class TestCards:
    def test_a_card_that_failed_twice_is_left_out_until_it_is_forgiven(self, tmp_path: Path) -> None:
        good = cards("", "")
        assert leave_out(good, tmp_path) == good
        assert not [*tmp_path.iterdir()]
        leave_out(cards("", "hanging"), tmp_path)
        assert leave_out(good, tmp_path) == good
        leave_out(cards("", "absent"), tmp_path)
        first, second = leave_out(good, tmp_path)
        assert first == good[0]
        assert second.why == "excluded: it failed 2 times, the last time as absent; --vtp-forgive uses it again"
        # Once for each start of the launcher: it restarts the ranks with the same flags.
        assert leave_out(good, tmp_path, forgives="host 1") == good
        leave_out(cards("", "absent"), tmp_path, forgives="host 1")
        assert leave_out(good, tmp_path, forgives="host 1") == good
        leave_out(cards("", "absent"), tmp_path, forgives="host 1")
        assert leave_out(good, tmp_path, forgives="host 1")[1].why
        assert leave_out(good, tmp_path, forgives="host 2") == good

    def test_a_card_that_stays_bad_has_failed_once(self, tmp_path: Path) -> None:
        for _ in range(3):
            leave_out(cards("absent"), tmp_path)
        other = [replace(cards("")[0], node="a")]
        assert leave_out(other, tmp_path) == other  # b is lost meanwhile
        assert leave_out(cards(""), tmp_path) == cards("")

    def test_a_card_that_reports_errors_in_training_is_left_out_after_two(self, tmp_path: Path) -> None:
        environment = {RUN_FOLDER_VARIABLE: str(tmp_path), CARD_VARIABLE: "b local rank 0"}
        fault = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
        for other in (RuntimeError("CUDA error: out of memory"), RuntimeError("NCCL error"), ValueError("bad sample")):
            note_error(other, environment)
        site, good = tmp_path / "site", cards("", "")  # rank 0 keeps its memory elsewhere
        site.mkdir()
        environment[RUN_FOLDER_VARIABLE] = str(site)
        assert leave_out(reporting(good, site), tmp_path) == good
        note_error(fault, environment)
        assert not any(card.why for card in leave_out(reporting(good, site), tmp_path))
        assert leave_out(reporting(good, site), tmp_path) == good
        note_error(fault, environment)
        first, second = leave_out(reporting(good, site), tmp_path)
        assert first.why.startswith("excluded: it failed 2 times, the last time as CUDA error: an illegal")
        assert not second.why
        assert sorted(path.name for path in tmp_path.iterdir()) == ["site", "vtp_cards.json"]
        assert not [*site.iterdir()]

    def test_a_file_that_cannot_be_read_is_named(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "vtp_cards.json").write_text("{")
        assert leave_out(cards(""), tmp_path) == cards("")
        assert "vtp_cards.json cannot be read" in caplog.text


class TestMarker:
    def test_what_no_restart_cures_is_said_by_every_later_start(self, tmp_path: Path) -> None:
        environment = {RUN_FOLDER_VARIABLE: str(tmp_path / "new")}
        require_unmarked(tmp_path / "new")
        leave_marker("nothing fits; bring a card", environment)
        leave_marker("another line", environment)
        with pytest.raises(
            ConfigError, match=r"^nothing fits; bring a card; no restart cures this; .* remove .*new/vtp_"
        ):
            require_unmarked(tmp_path / "new")
        assert [path.name for path in (tmp_path / "new").iterdir()] == [MARKER]
        (tmp_path / "new" / MARKER).unlink()
        require_unmarked(tmp_path / "new")

    @pytest.mark.parametrize(
        ("error", "is_consequence", "is_left"),
        [
            (LayoutError("nothing fits"), False, True),
            (LayoutError("nothing fits"), True, False),
            (AssertionError("a loss is not finite"), False, False),
            (PeerError("rank 1: no answer"), False, False),
            (ConfigError("the folder belongs to another run", is_final=False), False, False),
            (RuntimeError("CUDA error"), False, False),
        ],
    )
    def test_only_for_that(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, is_consequence: bool, is_left: bool
    ) -> None:
        monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
        note_for_next_start(error, is_consequence)
        assert (tmp_path / MARKER).exists() is is_left

    def test_a_run_that_nobody_restarts_leaves_none(self, tmp_path: Path) -> None:
        leave_marker("nothing fits", {})
        assert not [*tmp_path.iterdir()]


def test_a_later_start_ends_at_once(tmp_path: Path) -> None:
    leave_marker("nothing fits; bring a card", {RUN_FOLDER_VARIABLE: str(tmp_path)})
    begin_s = time.monotonic()
    words = "run examples/pretrain_gpt.py --vtp-size-list auto --vtp-stages 1:2 --save"
    done = subprocess.run(
        [sys.executable, "-m", "vtp_plugin", *words.split(), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60 * pace(),
    )
    assert time.monotonic() - begin_s < 5.0 * pace()
    assert done.returncode == 1 and "nothing fits; bring a card; no restart cures this" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


HOLD = """
import os, sys, time
from pathlib import Path
from vtp_plugin.checkpoint.save.saving import FolderLock
lock = FolderLock(Path(sys.argv[1]), {"TORCHELASTIC_RUN_ID": "first"}, 0.0)
child = os.fork()  # as a data loader, which outlives its rank
if child:
    print(child, flush=True)
time.sleep(600)
"""


class TestLock:
    def test_the_other_run_is_named_and_a_dead_one_does_not_matter(self, tmp_path: Path) -> None:
        other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        try:
            assert other.stdout is not None
            child = int(other.stdout.readline())
            with pytest.raises(
                ConfigError, match=rf"another run, first \(process {other.pid} on .*give another"
            ) as found:
                FolderLock(tmp_path, {"TORCHELASTIC_RUN_ID": "second"}, 0.3)
            assert not found.value.is_final
        finally:
            other.kill()
            other.wait()
        try:
            FolderLock(tmp_path, {"TORCHELASTIC_RUN_ID": "second"}, 5.0 * pace()).release()
        finally:
            os.kill(child, signal.SIGKILL)
            other.communicate()
        assert json.loads((tmp_path / "vtp_lock.json").read_text())["run"] == "second"

    def test_processes_of_one_run_share_it(self, tmp_path: Path) -> None:
        words = HOLD.replace("0.0)", '0.0, token="ours")')
        other = subprocess.Popen([sys.executable, "-c", words, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        child = int(other.stdout.readline())
        os.kill(child, signal.SIGKILL)
        try:
            FolderLock(tmp_path, {}, 0.0, token="ours").release(removes=True)
            with pytest.raises(ConfigError, match=rf"--save {tmp_path} belongs to another run, first"):
                FolderLock(tmp_path, {}, 0.0, token="theirs")
        finally:
            other.kill()
            other.communicate()

    def test_it_waits_for_an_attempt_that_is_ending(self, tmp_path: Path) -> None:
        other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        child = int(other.stdout.readline())
        os.kill(child, signal.SIGKILL)
        killer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {other.pid}"])
        FolderLock(tmp_path, {}, 30.0 * pace()).release()
        killer.wait()
        other.communicate()


class TestProgress:
    def test_what_was_lost_is_counted_at_the_first_step(self, tmp_path: Path) -> None:
        environment = {RUN_FOLDER_VARIABLE: str(tmp_path), "RANK": "0"}
        assert Progress.of_process(environment) is None
        hand_on("2,2", None, environment)
        first = Progress.of_process(environment)
        assert first is not None
        assert [first.note(step, 8 * step, 8) for step in (1, 2, 3, 4, 5, 6, 7)] == [None] * 7
        last = read_last(tmp_path)
        assert last is not None and (last.iteration, last.samples, last.sizes) == (7, 56, "2,2")
        hand_on("2,1", asdict(last), environment)
        second = Progress.of_process(environment)
        assert second is not None
        lost = second.note(5, 40, 8)
        assert lost is not None and (lost.steps, lost.samples) == (3, 24) and 0 <= lost.seconds < 60
        assert second.note(6, 48, 8) is None

    def test_attempts_without_a_step_are_told_too(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        """Three attempts: one that makes seven steps, and two that end before their first one."""
        sizes = {"context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
        args = SimpleNamespace(num_layers=4, micro_batch_size=1, global_batch_size=8, padded_vocab_size=128, **sizes)
        config = VtpConfig(size_list="auto", stages=(1, 1), data_parallel_size=1)

        def begin(*why: str) -> list[str]:
            coordinator = Coordinator(args=args, config=config, folder=tmp_path, on_loss='echo "$VTP_LOSS"')
            outcome = coordinator.decide(cards(*why))
            coordinator.close()
            hand_on(format_value(outcome.chosen.sizes), outcome.last and asdict(outcome.last), environment)
            told, lines = capfd.readouterr().out, coordinator.lines
            assert told == (f"{lines[-1]}; {lines[0]}\n" if outcome.last else "")
            return lines[1:]

        environment = {RUN_FOLDER_VARIABLE: str(tmp_path), "RANK": "0"}
        assert begin("", "") == []
        first = Progress.of_process(environment)
        assert first is not None and first.note(7, 56, 8) is None
        assert begin("", "absent")[-1] == "the attempt with TP sizes 2 ended after step 7"
        assert begin("", "")[-1] == "the attempt with TP sizes 1 ended before its first step"
        assert begin("absent", "")[-1] == "the attempt with TP sizes 2 ended before its first step"
        fourth = Progress.of_process(environment)
        lost = fourth and fourth.note(5, 40, 8)
        assert lost is not None and lost.text.startswith(
            "lost with TP sizes 2 and 2 times more before a first step, the last time with 2: 3 steps and 24 samples"
        )
        assert begin("", "")[-1] == "the attempt with TP sizes 1 ended after step 5"

    def test_a_slow_machine_ends_no_run_for_good(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The edge of a U-shape without its device does; but not where the device was not tried, or the node hangs."""
        sizes = {"context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
        args = SimpleNamespace(num_layers=4, micro_batch_size=1, global_batch_size=8, **sizes)
        config = VtpConfig(
            size_list="auto",
            stages=(2, 2),
            data_parallel_size=1,
            layerwise_disaggregated=True,
            num_layer_list=(1, 2, 1),
            sites=("edge", "cloud"),
        )
        slow, absent = "slow: its test did not start within 420 s (a busy machine or a slow disk)", "absent: gone"
        for why, is_final in ((slow, False), ("hanging: no answer within 60 s", False), (absent, True)):
            edge = replace(cards(why)[0], node="e", site="edge")
            coordinator = Coordinator(args=args, config=config, folder=tmp_path)
            with pytest.raises(LayoutError, match="site edge has no device left") as found:
                coordinator.decide([edge, replace(cards("")[0], site="cloud")])
            coordinator.close()
            assert found.value.is_final is is_final
            assert f"excluded device: e local rank 0 is {why}" in caplog.text

    def test_only_one_rank_writes(self, tmp_path: Path) -> None:
        environment = {RUN_FOLDER_VARIABLE: str(tmp_path), "RANK": "1"}
        hand_on("2,2", None, environment)
        progress = Progress.of_process(environment)
        assert progress is not None and progress.note(1, 8, 8) is None
        assert not [*tmp_path.iterdir()]

    def test_a_run_that_has_ended_has_lost_nothing(self, tmp_path: Path) -> None:
        write_last(tmp_path, LastStep(iteration=7, samples=56, at_s=1.0, sizes=",".join("8" * 100)))
        write_last(tmp_path, LastStep(iteration=8, samples=64, at_s=2.0, sizes="2"))
        assert read_last(tmp_path) == LastStep(iteration=8, samples=64, at_s=2.0, sizes="2")
        note_end(tmp_path)
        assert read_last(tmp_path) is None
        (tmp_path / PROGRESS).write_text("{")
        assert read_last(tmp_path) is None


FITTED = """
    --num-layers 2 --hidden-size 48 --num-attention-heads 12 --seq-length 64 --micro-batch-size 2 --global-batch-size 8
    --vtp-device cpu --vtp-size-list auto --vtp-stages 1:1
"""


# Found by each interpreter that starts: the test of a device takes this long to begin.
SLOW_START = """
import os, sys, time
if any("card_probe" in word for word in sys.orig_argv):
    time.sleep(float(os.environ["SLOW_START_S"]))
"""


def test_only_a_script_that_ends_well_has_lost_nothing(tmp_path: Path) -> None:
    """Also before Megatron has begun, when nobody watches the run yet. One has the sampler that depends on replicas.

    The tests of two devices start more slowly than a device may take to answer: they are used all the same.
    """
    timeout_s = 20.0 * pace()
    slow = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "SLOW_START_S": str(0.35 * timeout_s)}
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    ends = {"return": "", "status 0": "sys.exit(0)", "status 3": "sys.exit(3)", "error": "raise RuntimeError"}
    runs: dict[str, subprocess.Popen[bytes]] = {}
    for way, line in ends.items():
        script = tmp_path / f"{way}.py"
        script.write_text(f"import sys\n{line}\n")
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        env = {**os.environ, **place, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "vtp_plugin", "run", str(script), *FITTED.split(), "--save", str(tmp_path / way)]
        words += ["--dataloader-type", "cyclic" if way == "return" else "single"]
        if way in ("return", "status 0"):
            env |= slow
            words += ["--vtp-timeout-s", str(timeout_s)]
        with (tmp_path / f"{way}.log").open("w") as log:
            runs[way] = subprocess.Popen(words, cwd=ROOT, env=env, stderr=log)
    assert {way: run.wait(timeout=120 * pace()) for way, run in runs.items()} == dict(
        zip(ends, (0, 0, 3, 1), strict=True)
    )
    assert [way for way in ends if read_last(tmp_path / way) is not None] == ["status 3", "error"]
    warned = [(tmp_path / f"{way}.log").read_text().count(" warning: --dataloader-type cyclic: which") for way in ends]
    assert warned == [1, 0, 0, 0]


LEAVE = """
import subprocess, sys, time
from vtp_plugin.checkpoint.save.saving import Savings
from vtp_plugin.elastic.orphans import end_orphans
assert end_orphans()
savings = Savings()
savings.scratch("tracker").write_text("4")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("way", ["killed", "killed with its group", "ended"])
def test_what_a_rank_has_started_ends_with_it(way: str, tmp_path: Path) -> None:
    """So do its processes, and what it has in the folder for temporary files."""
    seconds = "1" if way == "ended" else "600"
    words, env = [sys.executable, "-c", LEAVE, seconds], {**os.environ, "TMPDIR": str(tmp_path)}
    rank = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env)
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    assert [*tmp_path.iterdir()]
    if way == "killed":
        rank.kill()
    elif way == "killed with its group":
        os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()
    rank.stdout.read()  # ends when no process of the group holds it open
    deadline_s = time.monotonic() + 20.0 * pace()
    while _lives(child) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not _lives(child) and not [*tmp_path.iterdir()]
    rank.stdout.close()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _caused(cause: Exception) -> ConfigError:
    """Make the error of a check of all ranks in which one of them found another error."""
    error = ConfigError(f"rank 0: {cause}", is_final=False)
    error.__cause__ = cause
    return error


class TestFailedStarts:
    ERROR = FileNotFoundError(2, "No such file or directory", "tok.model")

    def fail(
        self,
        folder: Path,
        error: BaseException,
        *,
        attempt: str,
        words: tuple[str, ...] = ("script.py",),
        has_failed_before: bool = False,
    ) -> None:
        """End a start as a rank does whose error reaches the hook."""
        environment = {RUN_FOLDER_VARIABLE: str(folder)}
        name_start(words, attempt, environment)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
            note_for_next_start(error, has_failed_before)

    def test_equal_ones_end_a_run_once_for_each_start(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        for number in range(MOST_EQUAL - 1):
            for _ in range(3):  # ranks of one start
                self.fail(tmp_path, self.ERROR, attempt=f"a{number}")
        assert not (tmp_path / MARKER).exists() and "is tried" not in capfd.readouterr().err
        self.fail(tmp_path, self.ERROR, attempt="b")
        said = (
            "FileNotFoundError: [Errno 2] No such file or directory: 'tok.model'; 5 starts ended like this before "
            "their first step"
        )
        with pytest.raises(ConfigError, match=rf"^{re.escape(said)}; no restart cures this; fix it, then remove "):
            require_unmarked(tmp_path)
        assert f"fix it, then remove {tmp_path / MARKER}\n" in capfd.readouterr().err
        # The way out: counting begins anew.
        (tmp_path / MARKER).unlink()
        assert [*tmp_path.iterdir()] == []
        self.fail(tmp_path, self.ERROR, attempt="c")
        require_unmarked(tmp_path)

    @pytest.mark.parametrize(
        "errors",
        [
            # Of several ways the first to come five times ends it; numbers do not tell ways apart.
            [
                RuntimeError("out of memory: 20 MiB, process 7"),
                ValueError(),
                RuntimeError("out of memory: 4 MiB, process 31"),
            ],
            [SystemExit(3), SystemExit("no data"), SystemExit(3)],
            [_caused(OSError("/data is gone"))],
        ],
        ids=["numbers", "statuses", "in a check of all ranks"],
    )
    def test_what_counts(self, tmp_path: Path, errors: list[BaseException]) -> None:
        for number in range(2 * MOST_EQUAL):
            self.fail(tmp_path, errors[number % len(errors)], attempt=str(number))
        assert (tmp_path / MARKER).exists()

    @pytest.mark.parametrize(
        "error",
        [
            PeerError("waited 9.0 s for rank 1: no answer"),
            ShortageError("too few cards"),
            ConfigError("--save x belongs to another run", is_final=False),
            RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711"),
            KeyboardInterrupt(),
            RuntimeError("wait timeout after 600000ms, keys: /vtp/0/default_pg/0//worker_count"),
            TimeoutError("the tokenizer's server"),
            subprocess.TimeoutExpired("make", 60),
        ],
        ids=repr,
    )
    def test_what_a_restart_may_cure_does_not(self, tmp_path: Path, error: BaseException) -> None:
        for number in range(2 * MOST_EQUAL):
            self.fail(tmp_path, error, attempt=str(number))
            self.fail(tmp_path, self.ERROR, attempt=str(number), has_failed_before=True)
        assert not [*tmp_path.iterdir()]

    @pytest.mark.parametrize("what", ["a step", "a good end", "other flags", "another error", "another site"])
    def test_what_begins_anew(self, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        folder, words, error = tmp_path / "ck", ("script.py",), self.ERROR
        for number in range(MOST_EQUAL - 1):
            self.fail(folder, error, attempt=str(number))
        if what == "a step":
            monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(folder))
            monkeypatch.setenv(START_VARIABLE, "flags attempt")
            Progress(None, "2", None).note(1, 8, 8)
            note_for_next_start(error, False)  # behind its first step: that is no failed start
            assert not (folder / FAILED_STARTS).exists()
        elif what == "a good end":
            forget_failed_starts({RUN_FOLDER_VARIABLE: str(folder), START_VARIABLE: "flags attempt"})
        elif what == "other flags":
            words = ("script.py", "--lr", "1")
        elif what == "another error":
            error = ValueError("another")
        elif what == "another site":
            folder = tmp_path / "other"
        self.fail(folder, error, attempt="last", words=words)
        assert not [*tmp_path.rglob(MARKER)]

    def test_no_link_is_followed(self, tmp_path: Path) -> None:
        """Nor is what a stranger has written believed."""
        victim, folder = tmp_path / "victim", tmp_path / "ck"
        victim.write_text("a key")
        folder.mkdir()
        for name in (FAILED_STARTS, MARKER, PROGRESS):
            (folder / name).symlink_to(victim)
            for own in (f".{name}.{os.getpid()}.{os.uname().nodename}",):
                (folder / own).symlink_to(victim)
        for number in range(MOST_EQUAL + 1):
            self.fail(folder, self.ERROR, attempt=str(number))
        write_last(folder, LastStep(iteration=1, samples=8, at_s=1.0, sizes="2"))
        assert victim.read_text() == "a key"
        for text in ("{", "[" * 100_000, "[]", '{"flags": 1, "reasons": 2}', "\xff"):
            (folder / FAILED_STARTS).unlink(missing_ok=True)
            (folder / FAILED_STARTS).write_text(text, encoding="latin-1")
            self.fail(folder, self.ERROR, attempt="x")
            assert json.loads((folder / FAILED_STARTS).read_text())["reasons"]
