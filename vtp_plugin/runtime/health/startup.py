"""Checks that all ranks make together: what each may tell, what is compared, and the verdict.

Start-up checks that all ranks pass or fail together, over the store, before any process group exists.

If a check failed on one rank only, the others would wait inside a collective that never comes. So every rank posts
what it is about to do (its *statement*) or the error that it found. Rank 0 compares the posts and posts one verdict.
All ranks read it; then all go on, or all end with the same reason. The cost is linear in the world size: one key per
rank, and the verdict.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PeerError, is_final
from vtp_plugin.runtime.health.redaction import HIDDEN, Redaction, describe_error, is_same_value, show_stated
from vtp_plugin.runtime.health.startup_waiting import (
    JUDGE_SHARE,
    UNKNOWN_PEER,
    WAITED,
    WaitingLines,
    await_readers,
    poll,
    some_ranks,
    tell_read,
    time_limit,
    until_store_ends,
)
from vtp_plugin.runtime.health.store import PostError, Topic, open_round, part_of, read_post, read_text, write_post
from vtp_plugin.util.text import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What a rank posts.

    Attributes:
        says: statement of the rank; None if it failed.
        error: why it failed; empty if it did not.
        is_final: whether no restart cures the error.
    """

    says: dict[str, object] | None = None
    error: str = ""
    is_final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What the coordinator concludes from all posts.

    Attributes:
        text: why all ranks end; empty if they agree.
        name: name of the value that differs; None if that is not the reason.
        is_missing: whether a rank did not come.
        is_final: whether no restart cures the error.
        speakers: ranks with an error that not all have; the first rank of those with each error.
    """

    text: str = ""
    name: str | None = None
    is_missing: bool = False
    is_final: bool = False
    speakers: tuple[int, ...] = ()


def summarise_errors(errors: Mapping[int, str], *, is_whole: bool) -> tuple[str, tuple[int, ...]]:
    """Group equal texts, so that one mistake on 4,000 ranks is one line, and name the first rank with each text.

    Args:
        errors: text of every rank that has found one.
        is_whole: whether these are all ranks of the run; if they have one error, the text names no rank.

    >>> summarise_errors({0: "a", 1: "a"}, is_whole=True)
    ('a', ())
    >>> summarise_errors({1: "a", 2: "a", 3: "b"}, is_whole=False)
    ('rank 1, 2: a; rank 3: b', (1, 3))
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        ranks_of.setdefault(text, []).append(rank)
    if is_whole and len(ranks_of) == 1:
        return next(iter(ranks_of)), ()
    text = "; ".join(f"rank {some_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())
    return text, tuple(ranks[0] for ranks in ranks_of.values())


_SAME_START = "start every rank with the same command line and the same versions"
# What differs in later checks may be files, of which machines learn late.
_OF_FLAGS = ("start", "start-up check")
# Once an error is known, rank 0 waits no longer than this for ranks that have not come.
_GRACE_S = 5.0
# Rank 0 posts whom it waits for this soon, so that the first waiting lines of the others can name the ranks.
_POST_MISSING_S = 1.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """Checks that all ranks pass or fail together. All ranks of the world settle the same checks in the same order.

    Attributes:
        store: reaches all ranks.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: returns how long to wait for the others; called at every check, since a check may change it.
        members: global ranks that take part, the coordinator first; None for all ranks.
        way_out: advice for the error about statements that differ.
        redaction: says what the others may learn from this rank. It is asked after a check's ``prepare`` has run,
            because ``prepare`` may be what finds out this rank's site. By default all ranks are at one site.
    """

    store: dist.Store
    rank: int
    world_size: int
    timeout_s: Callable[[], float]
    redaction: Callable[[], Redaction] = lambda: Redaction(is_one_site=True)
    members: tuple[int, ...] | None = None
    way_out: str = _SAME_START

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that take part."""
        return range(self.world_size) if self.members is None else self.members

    def settle(
        self,
        name: str,
        prepare: Callable[[], Mapping[str, object]],
        *,
        is_partial: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Run ``prepare`` on every rank, and return only if it succeeded everywhere with equal results.

        ``SystemExit`` counts as a failure, too: some of Megatron's checks exit.

        Args:
            name: name of the check, for error messages; it may come again, since rounds are counted.
            prepare: the check; returns JSON values that must be equal on all ranks. The error names the first value
                that differs.
            is_partial: whether a rank may leave out values that another rank states.
            timeout_s: limit of this check; default is the usual limit, read before ``prepare`` runs.

        Raises:
            ConfigError: a rank failed, or two statements differ. The text is the same on all ranks, but for what may
                not cross between sites: a rank reads its own error and its own value there.
            PeerError: a rank did not answer within the timeout.
        """
        limit_s = self.timeout_s() if timeout_s is None else timeout_s
        statement: Mapping[str, object] = {}
        error: Exception | SystemExit | None = None
        try:
            statement = prepare()
        except (Exception, SystemExit) as found:
            error = found
        _Check(self, name, limit_s, self.redaction(), is_partial).settle(statement, error)


@dataclass(frozen=True, slots=True)
class _Check:
    """One round of an agreement on this rank."""

    agreement: Agreement
    name: str
    timeout_s: float
    redaction: Redaction
    is_partial: bool

    @property
    def coordinator(self) -> int:
        """The rank that compares all posts."""
        return self.agreement.ranks[0]

    @property
    def topic(self) -> str:
        """Name of the check's part of the store, for errors."""
        return f"{Topic.CHECKS.key}/{self.name}"

    def settle(self, statement: Mapping[str, object], error: BaseException | None) -> None:
        """Post this rank's statement or error, and return only if every rank made the same statement."""
        posted = "" if error is None else one_line(self.redaction.describe(error))
        own = (
            Post(error=posted, is_final=is_final(error))
            if error is not None
            else Post(says=self.redaction.state(statement))
        )
        begin_s = time.monotonic()
        keeper = f"rank {self.coordinator} or the launcher, which keeps the store"
        with (
            until_store_ends(keeper, self.name),
            time_limit(self.agreement.rank, self.timeout_s, f"for the store at {self.name}: no answer"),
        ):
            verdict = self._exchange(write_post(asdict(own)), begin_s)
        if not verdict.text:
            return
        text = verdict.text
        if error is not None:
            own_text = describe_error(error)
            # What is cut may lack it.
            text = text.replace(posted, own_text) if posted and posted in text else f"{own_text}; {text}"
        if verdict.name is not None and HIDDEN in text:
            text += f"; here {verdict.name} is {statement.get(verdict.name)}"
        kind = PeerError if verdict.is_missing else ConfigError
        found = kind(text, shared=verdict.text, is_final=self._is_final(verdict, error))
        found.is_known_to_node = text == verdict.text and self._is_said_by_first(verdict)
        raise found from error

    def _is_said_by_first(self, verdict: CheckResult) -> bool:
        """Tell whether the first rank of this machine, which reads the same verdict, may speak for this one.

        It may not be among the ranks of the check, or not have come; and an error that not all have is also printed by
        the first rank that has it.
        """
        rank = self.agreement.rank
        return self.agreement.members is None and not verdict.is_missing and rank not in verdict.speakers

    def _is_final(self, verdict: CheckResult, error: BaseException | None) -> bool:
        """Tell whether no restart is of use. Between sites only this rank's own error says so: the other site may lie.

        What rank 0 finds rests on the posts of both.
        """
        if self.redaction.trusts_coordinator:
            return verdict.is_final
        return error is not None and is_final(error)

    def _exchange(self, own: str, begin_s: float) -> CheckResult:
        """Post, compare all posts on the coordinator, and return the verdict."""
        rank = self.agreement.rank
        exchange = open_round(dist.PrefixStore(self.name, part_of(self.agreement.store, Topic.CHECKS)), rank)
        posts = exchange.posts
        posts.set(str(rank), own)
        if rank != self.coordinator:
            verdict = self._read_verdict(posts, begin_s)
            tell_read(posts, "farewell")
            return verdict
        verdict, num_present = self._compare_posts(posts, begin_s)
        posts.set("verdict", json.dumps(asdict(verdict)))
        if num_present == len(self.agreement.ranks):
            exchange.clear_last([*map(str, self.agreement.ranks), "verdict", "missing", "farewell"])
        if verdict.text:
            # This rank may own the store's server: it leaves last, or the others never learn why.
            await_readers(posts, "farewell", num_present - 1, self.timeout_s)
        return verdict

    def _compare_posts(self, posts: dist.Store, begin_s: float) -> tuple[CheckResult, int]:
        """Compare all posts on rank 0; return the verdict and how many ranks came."""
        limit_s = JUDGE_SHARE * self.timeout_s
        deadline_s = begin_s + limit_s
        lines = WaitingLines(limit_s, lambda: self._post_missing(posts))
        missing: list[int] = []
        errors: dict[int, str] = {}
        are_final = True
        statements: dict[int, dict[str, Any]] = {}
        for rank in self.agreement.ranks:
            if not self._await_post(posts, rank, deadline_s - time.monotonic(), lines):
                missing.append(rank)
                continue
            post = self._read_post(posts, rank)
            if post.says is None:
                errors[rank] = post.error
                are_final = are_final and post.is_final
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
            else:
                statements[rank] = post.says
        num_present = len(self.agreement.ranks) - len(missing)
        if errors:
            is_whole = self.agreement.members is None and len(errors) == self.agreement.world_size
            text, speakers = summarise_errors(errors, is_whole=is_whole)
            return CheckResult(text=one_line(text), is_final=are_final, speakers=speakers), num_present
        if missing:
            waited_s = time.monotonic() - begin_s
            text = f"{WAITED} {waited_s:.1f} s for rank {some_ranks(missing)} at {self.name}: no answer; {UNKNOWN_PEER}"
            return CheckResult(text=text, is_missing=True), num_present
        name, text = find_difference(statements, is_partial=self.is_partial, way_out=self.agreement.way_out)
        return CheckResult(text=one_line(text), name=name, is_final=self.name in _OF_FLAGS), num_present

    def _read_post(self, posts: dist.Store, rank: int) -> Post:
        """Read a rank's post on the coordinator; a malformed one counts as an error of that rank, which all learn."""
        try:
            post = read_post(Post, posts, str(rank), self.topic)
            if (post.says is None) is (not post.error):
                raise PostError(self.topic, str(rank), "has neither a statement nor an error")
        except PostError as error:
            return Post(error=str(error))
        return post

    def _post_missing(self, posts: dist.Store) -> str:
        """Post on rank 0 which ranks have not come, so that the others can name them too."""
        missing = some_ranks([rank for rank in self.agreement.ranks if not posts.check([str(rank)])])
        posts.set("missing", missing)
        return f"rank {missing} at {self.name}"

    def _await_post(self, posts: dist.Store, rank: int, limit_s: float, lines: WaitingLines) -> bool:
        """Wait on rank 0 for the post of a rank; meanwhile post who is missing."""
        due_s = time.monotonic() + _POST_MISSING_S

        def is_there() -> bool:
            nonlocal due_s
            if posts.check([str(rank)]):
                return True
            if time.monotonic() >= due_s:
                due_s += 5 * _POST_MISSING_S
                self._post_missing(posts)
            return False

        return poll(is_there, limit_s, lines=lines)

    def _read_verdict(self, posts: dist.Store, begin_s: float) -> CheckResult:
        coordinator = str(self.coordinator)

        def whom() -> str:
            if posts.check(["missing"]):
                return f"rank {read_text(posts, 'missing')} at {self.name}"
            return f"{'another rank' if posts.check([coordinator]) else f'rank {coordinator}'} at {self.name}"

        lines = WaitingLines(self.timeout_s, whom)
        while True:
            left_s = begin_s + self.timeout_s - time.monotonic()
            try:
                posts.wait(["verdict"], timedelta(seconds=max(0.01, min(left_s, lines.pause_s))))
                return read_post(CheckResult, posts, "verdict", self.topic)
            except dist.DistStoreError:
                if begin_s + self.timeout_s > time.monotonic():
                    lines.say()
                    continue
            waited = f"{WAITED} {time.monotonic() - begin_s:.1f} s"
            # The coordinator has begun later than this rank: there is no verdict yet, but it has posted for whom it
            # waits.
            waits = f"rank {coordinator}, which still waits for another rank, at {self.name}"
            whom_text = waits if posts.check([coordinator]) and not posts.check(["missing"]) else whom()
            text = f"{waited} for {whom_text}: no answer; {UNKNOWN_PEER}"
            raise PeerError(text, shared=text) from None


def find_difference(
    statements: Mapping[int, Mapping[str, object]], *, is_partial: bool = False, way_out: str = _SAME_START
) -> tuple[str | None, str]:
    """Name the first value in which ranks differ, with all ranks that state it; None and no text when all are equal.

    Args:
        statements: values of every rank, by ascending rank, as
            :meth:`~vtp_plugin.runtime.health.redaction.Redaction.state` gives them.
        is_partial: whether a rank may leave out values that another one states.
        way_out: advice for the error.

    >>> find_difference({0: {"sizes": [1, 2]}, 1: {"sizes": [1, 2]}})
    (None, '')
    >>> find_difference({0: {"sizes": "1,2"}, 1: {"sizes": "1,3"}, 2: {"sizes": "1,3"}})[1][:59]
    'ranks disagree: sizes is 1,2 on rank 0 and 1,3 on rank 1, 2'
    >>> find_difference({0: {}, 1: {"sliced": True}, 2: {"sliced": False}}, is_partial=True)[1][:60]
    'ranks disagree: sliced is True on rank 1 and False on rank 2'
    """
    first_to_say: dict[str, int] = {} if is_partial else dict.fromkeys((k for s in statements.values() for k in s), 0)
    for rank, statement in statements.items():
        for name in statement if is_partial else first_to_say:
            other = first_to_say.setdefault(name, rank)
            if not is_same_value(statements[other].get(name), statement.get(name)):
                return name, f"{_show_difference(name, statements, is_partial=is_partial)}; {way_out}"
    return None, ""


def _show_difference(name: str, statements: Mapping[int, Mapping[str, object]], *, is_partial: bool) -> str:
    """List who states what. Values are grouped by comparison: a site may hide a value that another site shows."""
    groups: list[tuple[object, list[int]]] = []
    for rank, statement in statements.items():
        if is_partial and name not in statement:
            continue
        value = statement.get(name)
        for known, ranks in groups:
            if is_same_value(known, value):
                ranks.append(rank)
                break
        else:
            groups.append((value, [rank]))
    shown = " and ".join(f"{show_stated(value)} on rank {some_ranks(ranks)}" for value, ranks in groups[:8])
    return f"ranks disagree: {name} is {shown}"
