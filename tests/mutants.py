"""Bugs that the tests must find: each breaks one rule of the protocol, for as long as its patch lasts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from rpcbench.protocol import backward, delivery
from rpcbench.protocol import effects as fx
from rpcbench.protocol.backward import BackwardPasses, Contexts, Tally, union_of_sends
from rpcbench.protocol.calls import Calls
from rpcbench.protocol.delivery import Delivery, Pair
from rpcbench.protocol.node import Node
from rpcbench.protocol.rrefs import DELETING, RELEASED, RRefs
from rpcbench.wire import messages as m


def users_go_before_they_are_confirmed(patch: pytest.MonkeyPatch) -> None:
    def retire(self: RRefs, fork: Any) -> Any:
        user = self.users[fork]
        if user.state not in (RELEASED, DELETING) or user.children:
            return []
        self._forget_user(fork)
        return [(user.owner, m.UserDelete(user.rref, fork))]

    patch.setattr(RRefs, "_retire_if_unused", retire)


def parents_do_not_wait_for_children(patch: pytest.MonkeyPatch) -> None:
    def retire(self: RRefs, fork: Any) -> Any:
        user = self.users[fork]
        if user.state is not DELETING:
            return []
        self._forget_user(fork)
        return [(user.owner, m.UserDelete(user.rref, fork))]

    patch.setattr(RRefs, "_retire_if_unused", retire)


def numbers_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    first_time = Delivery.is_first_time
    patch.setattr(Delivery, "is_first_time", lambda self, *which: first_time(self, *which) or True)


def calls_run_before_their_forks_are_confirmed(patch: pytest.MonkeyPatch) -> None:
    arrived = Calls.request_arrived
    patch.setattr(
        Calls, "request_arrived", lambda self, src, message, pending, now: arrived(self, src, message, set(), now)
    )


def nothing_takes_the_number_of_what_was_not_sent(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Pair, seq: int, instead: m.Message) -> fx.Send:
        del self.kept[seq & delivery._COUNT]
        return self.number_message(instead)

    patch.setattr(Pair, "replace_message", forget)


def last_words_are_heard(patch: pytest.MonkeyPatch) -> None:
    handle = Node.handle_message

    def hear(self: Node, source: int, *rest: Any) -> Any:
        self.gone.pop(source, None)
        return handle(self, source, *rest)

    patch.setattr(Node, "handle_message", hear)


def rrefs_that_come_home_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    adopt = RRefs.adopt_fork

    def forget(self: RRefs, fork: m.Fork) -> Any:
        outcome = adopt(self, fork)
        if fork.owner == self.me:
            return outcome[0], outcome[1] + self.drop_fork(fork.rref, fork.fork), outcome[2]
        return outcome

    patch.setattr(RRefs, "adopt_fork", forget)


def discovery_does_not_wait_for_answers(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: BackwardPasses, context: int, walk: Any, message: int, recvs: Any) -> Any:
        known, state = self._contexts[context], self._contexts[context].backward_passes[walk]
        new = [recv for recv in recvs if recv not in state.discovered_from]
        state.discovered_from.update(dict.fromkeys(new, message))
        effects, outbox = self._answer_if_explored(context, walk, state, message)
        return effects, [(known.recvs[recv].source, m.Discover(context, walk, recv)) for recv in new] + outbox

    patch.setattr(BackwardPasses, "_send_questions", hasty)


def messages_say_only_what_is_right_behind_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backward, "union_of_sends", lambda parts, *more: tuple({*more, *(part[0] for part in parts if part)}))


def what_is_unknown_is_taken_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        backward, "union_of_sends", lambda parts, *more: union_of_sends((part or () for part in parts), *more)
    )


def reports_count_once_for_all_gradients(patch: pytest.MonkeyPatch) -> None:
    def add(self: Tally, report: m.Settled) -> None:
        self.open.discard(report.message)
        self.open.update(report.fired)
        self.settled.add(report.message)
        self.awaited.update((one.message, one) for one in report.awaited)

    patch.setattr(Tally, "add_report", add)


def the_root_trusts_that_all_have_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tally, "unused_sends", lambda self: [])


def failed_passes_begin_again(patch: pytest.MonkeyPatch) -> None:
    failed = BackwardPasses.pass_failed

    def forget(self: BackwardPasses, failure: m.BackwardFailed, *rest: Any) -> Any:
        outcome = failed(self, failure, *rest)
        if failure.context in self._contexts:
            self._contexts[failure.context].failed.clear()
        return outcome

    patch.setattr(BackwardPasses, "pass_failed", forget)


def failures_are_told_to_the_root_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BackwardPasses, "_neighbour_ids", lambda self, known, state: set())


def late_calls_revive_contexts(patch: pytest.MonkeyPatch) -> None:
    release = Contexts.release_context

    def forget(self: Contexts, context: int, told: Iterable[int] = ()) -> Any:
        outcome = release(self, context, told)
        self._released.clear()
        return outcome

    patch.setattr(Contexts, "release_context", forget)


def lost_control_messages_are_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pair, "retransmit_messages", lambda self, counts: [])


def data_that_is_late_counts_as_lost(patch: pytest.MonkeyPatch) -> None:
    settled = Pair.process_report
    patch.setattr(
        Pair, "process_report", lambda self, fate: settled(self, m.DeliveryReport((*fate.lost, *fate.had), ()))
    )


def numbers_that_are_given_up_are_not_burnt(patch: pytest.MonkeyPatch) -> None:
    def fate(self: Pair, message: m.CancelDelivery) -> m.DeliveryReport:
        had = {count for count in message.counts if count < self.window.first_missing or count in self.window.ahead}
        return m.DeliveryReport(tuple(set(message.counts) - had), tuple(had))

    patch.setattr(Pair, "make_report", fate)


def nothing_is_acknowledged_twice(patch: pytest.MonkeyPatch) -> None:
    first_time = Delivery.is_first_time

    def once(self: Delivery, pair: Pair, seq: int, message: m.Message) -> bool:
        new = first_time(self, pair, seq, message)
        pair.owed -= 0 if new else 1
        return new

    patch.setattr(Delivery, "is_first_time", once)


def numbers_do_not_tell_incarnations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delivery, "_LIFE", 0)


def owners_are_taken_for_their_predecessors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Node, "is_alive", lambda self, worker, life: True)


def what_was_shared_with_a_predecessor_is_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Node, "_still_meant", lambda self, message: True)


# -- the fast path
def _is_next(pair: Pair, seq: int) -> bool:
    """Whether it is the next number that is due from its peer, of any incarnation."""
    return delivery.count_of(seq) == pair.window.first_missing and not pair.window.ahead


def messages_taken_briefly_may_come_again(patch: pytest.MonkeyPatch) -> None:
    def came(self: Delivery, pair: Pair, seq: int, message: m.Message) -> None:
        pair.owed += 1

    patch.setattr(Delivery, "accept_next", came)


def messages_taken_briefly_may_come_early(patch: pytest.MonkeyPatch) -> None:
    def next_from(self: Delivery, peer: int, seq: int) -> Pair | None:
        pair = self.pairs.get(peer) if self.ticking else None
        return pair if pair is not None and seq >= pair.first + pair.window.first_missing else None

    patch.setattr(Delivery, "next_in_order", next_from)


def messages_taken_briefly_may_be_for_a_predecessor(patch: pytest.MonkeyPatch) -> None:
    def next_from(self: Delivery, peer: int, seq: int) -> Pair | None:
        pair = self.pairs.get(peer) if self.ticking else None
        return pair if pair is not None and _is_next(pair, seq) else None

    patch.setattr(Delivery, "next_in_order", next_from)


def messages_taken_briefly_are_not_acknowledged(patch: pytest.MonkeyPatch) -> None:
    def next_from(self: Delivery, peer: int, seq: int) -> Pair | None:
        pair = self.pairs.get(peer)  # even without a tick that acknowledges
        if pair is None or seq >> delivery.SEQUENCE_COUNT_BITS != pair.stamp:
            return None
        return pair if _is_next(pair, seq) else None

    patch.setattr(Delivery, "next_in_order", next_from)


def answers_are_sent_briefly_to_who_waits_no_more(patch: pytest.MonkeyPatch) -> None:
    def answer(node: Node, to: int, result: m.Result) -> fx.Send | None:
        pair = node.delivery.pairs.get(to)
        return node.delivery.number_message(pair, result) if pair is not None and node.delivery.ticking else None

    patch.setattr(Node, "fast_answer", answer)


def answers_taken_briefly_leave_the_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Calls, "pop_outgoing", lambda self, call: self.outgoing.get(call))


def calls_begun_briefly_are_not_known(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Calls, "start_call", lambda self, *call: None)
