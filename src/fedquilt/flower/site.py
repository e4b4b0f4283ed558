"""The site's side of an order: its policy, its account, and a clip where the data are.

    python -m fedquilt.flower.warm --site /etc/fedquilt/site.toml ...

The prefork server takes up a task, and in the fork, before the app is even unpacked, `Site`

1. reads the order and compares it with the policy (`fedquilt.flower.policy`);
2. reserves what it costs in the site's own account, a ledger with one client, by the numbers of
   the order: clip and noise.  A round of a run is answered once;
3. lets the app do its work;
4. takes from the reply what may leave, clips it to the bound that was charged, and settles the
   charge, durable, before it hands the reply on.

So the account says at least what has left, wherever the process is killed.  A refusal is told to
the server as a reason that follows from the order, the policy and the account, never from data,
and to the operator as a line of the node's log and of `refused.log` beside the account.

The noise is the server's: that it adds what its order says is believed, and so is that it asks as
many others as it says.  What it cannot do is to receive a vector that is longer than what was
charged, or more of them than the account allows.  The app runs as the same user as this code:
what keeps it from writing to the account is that its hash is one that the site has named.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, MessageType

from fedquilt.aggregation.secure.primitives import ProtocolError
from fedquilt.common.errors import BudgetExceededError, FedquiltError
from fedquilt.common.formatting import format_bound, printable
from fedquilt.common.randomness import secret_bytes
from fedquilt.common.storage import append_line
from fedquilt.config import RunConfig
from fedquilt.flower import internals, wire
from fedquilt.flower.journal import older_part
from fedquilt.flower.keeper import SecureNode, step_of, trained
from fedquilt.flower.policy import EVALUATION, SitePolicy, SiteRefusal, read_policy, require
from fedquilt.privacy.ledger import Ledger, Population, Run, RunInfo
from fedquilt.privacy.ledger.entries import epsilon_spent
from fedquilt.privacy.ledger.files import add_note

log = logging.getLogger(__name__)

REFUSALS = "refused.log"
_POPULATION = "site"
_UNUSUAL = "this order cannot be read"
_LONGEST_NAME = 300
_REFUSALS_BYTES = 1 << 22  # a server that asks for ever fills no disk
_HAIR = 1e-9  # a masked vector is so much shorter than what is charged: sums of charges round
_ACCOUNT = "the account of this site does not take it"
_EVALUATES = "messages of type 'evaluate' are not taken: may_send lacks 'evaluation'"
_USED_UP = "what this run, or this site in its life, may take is used up"

Granted = tuple[float, Callable[[str], object]]
"""How long a vector may be, and what settles its charge by the digest of the reply."""
LoadApp = Callable[..., Callable[[Message, Context], Message]]


def site_account(
    path: Path, policy: SitePolicy, *, read_only: bool = False
) -> tuple[Ledger, Population]:
    """Open a site's account; its allowance is that of the policy it was made under, for good."""
    ledger = Ledger.open(path, create=not read_only, read_only=read_only)
    try:
        agreed = {"epsilon": policy.epsilon, "delta": policy.delta, "adjacency": policy.adjacency}
        made: dict[str, Any] = {"num_clients": 1, **agreed}
        return ledger, ledger.population(_POPULATION, **made)
    except BaseException:
        ledger.close()
        raise


def account_path(path: Path, policy: SitePolicy) -> Path:
    """Return where the account of a policy's file is."""
    return path.parent / policy.account


def refusals_path(path: Path) -> Path:
    """Return where refusals are written down: beside the account, as long as that is known."""
    try:
        return account_path(path, read_policy(path)).parent / REFUSALS
    except FedquiltError:
        return path.parent / REFUSALS


def run_facts(population: Population, run: RunInfo) -> dict[str, Any]:
    """Return what a run has taken of a site, as plain data."""
    charges = population.charges(run)
    taken = np.array([sum(float(charge.charges_mu2[0]) for charge in charges)])
    rounds = sorted(charge.round_index for charge in charges)
    return {
        "run": printable(run.name),
        "replies": len(charges),
        "rounds": f"{rounds[0] + 1} to {rounds[-1] + 1}" if rounds else "none",
        "epsilon": format_bound(float(epsilon_spent(taken, population.info.delta)[0])),
        "last": max((charge.time for charge in charges), default="never"),
    }


class Site:
    """Answers orders in the name of whoever holds the data.

    Parameters
    ----------
    path : Path
        The policy's file.
    trusted : str, optional
        The app that the prefork server was told to trust: the one, where the policy names none.
    secure : SecureNode, optional
        Takes this node's part in masked rounds.
    """

    def __init__(
        self, path: Path, trusted: str | None = None, secure: SecureNode | None = None
    ) -> None:
        self.path = path.resolve()
        self.trusted = trusted
        self.secure = secure

    def guard(self) -> None:
        """Let no ClientApp of this process see an order that the site does not take."""
        internals.guard_client_app(self.answer)

    def answer(self, message: Message, context: Context, app: str, load: LoadApp) -> Message:
        """Return the reply to an order: what may leave of it, or why there is none."""
        token = wire.token_of(message)
        try:
            content = self._answer(message, context, app, load)
        except SiteRefusal as refusal:
            self._tell(context, str(refusal))
            content = wire.pack_reply(token, None, refusal=str(refusal))
        except Exception:  # the server is told that it failed, never why
            log.exception("this site could not do its part of the round")
            content = wire.pack_reply(token, None)
        return Message(content, reply_to=message)

    def _answer(self, message: Message, context: Context, app: str, load: LoadApp) -> Any:
        policy = self._policy()
        require(message.has_content(), _UNUSUAL)
        if step_of(message.content) is not None:
            return self._masked(policy, message, context, app, load)
        evaluates = message.metadata.message_type == MessageType.EVALUATE
        require(not evaluates or EVALUATION in policy.may_send, _EVALUATES)
        order, config = _read(message, context, evaluates)
        policy.check(order, config, app, self.trusted, evaluates=evaluates)
        name = f"flower-{context.run_id}" + evaluates * "-evaluation"
        with self._charged(policy, order, config, name, raw=evaluates) as (limit, settle):
            try:
                reply = load()(message, context)
                if evaluates:
                    content = _row_of(reply, order)
                else:
                    content = _what_may_leave(reply, order, policy, limit)
            except Exception:
                # That it failed may follow from the data: it is told, so it is charged.
                log.exception("the app of this site failed")
                content = wire.pack_reply(order.token, None)
            settle(self._entered(policy, _told(message, order), _digest(content)))
            return content

    def _entered(self, policy: SitePolicy, told: dict[str, Any], reply: str) -> str:
        """Write down what an order said of itself; return the digest that its entry has."""
        return add_note(account_path(self.path, policy), {**told, "reply": reply})

    def _masked(
        self, policy: SitePolicy, message: Message, context: Context, app: str, load: LoadApp
    ) -> Any:
        """Answer a message of a masked round; its charge is settled before the vector leaves.

        From there on others can open the sum without this site, for the fewest survivors as far
        as it knows: that is charged.  Once it has seen that enough have signed how many more they
        are, what it paid too much is taken off its next charge in the run (`Keeper`).  So the
        account never has less than was given away, and at the end a part of one round more.
        """
        if self.secure is None:
            raise SiteRefusal("this site has no key and roster for masked sums")
        try:
            if step_of(message.content) == wire.STEPS[0]:
                return self._advertise(self.secure, policy, message, context, app, load)
            _check_address(message, context)
            if step_of(message.content) == "mask":
                note = self.secure.note(message.content, context)
                self._settle_masked(policy, note, self.secure.credit(note["run"], take=True))
            return self.secure.later(message.content, context)
        except ProtocolError as error:
            raise SiteRefusal(str(error)[:200]) from error

    def _advertise(
        self, secure: SecureNode, policy: SitePolicy, message: Message, context: Context, app: str,
        load: LoadApp,
    ) -> Any:  # fmt: skip
        order, config = _read(message, context)
        asked = wire.read_first(message.content)[0]
        # Rounding and Skellam noise cost a little more than clip and noise say.
        order = dataclasses.replace(order, charge=max(order.charge, asked.charge))
        policy.check(order, config, app, self.trusted, asked.total.least)
        name = wire.run_name(context.run_id)
        credit = secure.credit(name)
        with self._charged(policy, order, config, name, credit) as (limit, _):
            paid = (limit / order.clip) ** 2
            asked = asked.paid(paid * (1 - _HAIR))
            secure.begin(
                asked,
                context,
                smallest=policy.min_cohort,
                may_collude=policy.colluding_clients,
                charge=policy.charge(order) * paid,
                epsilon=min(config.epsilon, policy.epsilon),
                told=_told(message, order),
            )
            plain = trained(message, context, lambda told, here: load()(told, here))
            return secure.advertise(asked, plain)

    def _settle_masked(self, policy: SitePolicy, noted: dict[str, Any], credit: float) -> None:
        """Charge a round whose vector is about to leave."""
        index, charge = noted["round_index"], _due(noted["charge"], credit)
        try:
            ledger, population = site_account(account_path(self.path, policy), policy)
            with ledger:
                run = population.start_run(noted["run"], epsilon=noted["epsilon"])
                if index in run.settled():
                    raise SiteRefusal(f"round {index} of this run was answered before")
                reservation = run.reserve(index, [0], charge)
                if float(reservation.charges_mu2[0]) < charge * (1 - _HAIR):
                    raise SiteRefusal(_USED_UP)
                # No hash of a masked vector: whoever has the masks could try vectors against it.
                secret = secret_bytes(32).hex()
                run.settle(reservation, self._entered(policy, noted["told"], secret))
        except FedquiltError as error:
            raise self._account_refusal(error) from error

    def _policy(self) -> SitePolicy:
        try:
            return read_policy(self.path)
        except FedquiltError as error:
            log.error("the policy of this site: %s", printable(error))
            raise SiteRefusal("the policy of this site cannot be read") from error

    @contextmanager
    def _charged(
        self,
        policy: SitePolicy,
        order: wire.Order,
        config: RunConfig,
        name: str,
        credit: float = 0.0,
        *,
        raw: bool = False,
    ) -> Iterator[Granted]:
        """Reserve what an order costs; yield how long a vector that pays for, and what settles.

        What is `raw` has no bound, in whichever mode.
        """
        bounded = policy.is_bounded(config) and not raw
        try:
            ledger, population = site_account(account_path(self.path, policy), policy)
        except FedquiltError as error:
            raise self._account_refusal(error) from error
        with ledger:
            try:
                epsilon = min(config.epsilon, policy.epsilon) if bounded else None
                run = _begun(population, name, epsilon)
                index = order.round_index
                answered = index in run.settled()
                require(not answered, f"round {index} of this run was answered before")
                limit, settle = (
                    _reserved(run, policy, order, credit) if bounded else _unbounded(run, order)
                )
            except FedquiltError as error:
                raise self._account_refusal(error) from error
            yield limit, settle

    def _account_refusal(self, error: FedquiltError) -> SiteRefusal:
        """Return what the server hears of an account's refusal; its words are the operator's."""
        if isinstance(error, SiteRefusal):
            return error
        log.error("the account of this site: %s", printable(error))
        spent = isinstance(error, BudgetExceededError)
        return SiteRefusal(_USED_UP if spent else _ACCOUNT)

    def _tell(self, context: Context, reason: str) -> None:
        """Tell the operator in one line; a full disk does not undo the refusal."""
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        line = f"{when} run {context.run_id} refused: {printable(reason)}"
        log.warning(line)
        try:
            path = refusals_path(self.path)
            if path.exists() and path.stat().st_size > _REFUSALS_BYTES:
                path.replace(older_part(path))
            append_line(path, line, 0o600)
        except (OSError, FedquiltError) as error:
            log.error("it cannot be written down: %s", printable(error))


def _read(
    message: Message, context: Context, evaluates: bool = False
) -> tuple[wire.Order, RunConfig]:
    """Return an order and its settings; refuse what is none, or is another node's."""
    _check_address(message, context, MessageType.EVALUATE if evaluates else MessageType.TRAIN)
    try:
        order, _ = wire.unpack_order(message.content)
        order.members()
        return order, wire.read_settings(order.settings)
    except (FedquiltError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("an order cannot be read: %s", printable(error)[:300])
        raise SiteRefusal(_UNUSUAL) from error


def _check_address(message: Message, context: Context, wanted: str = MessageType.TRAIN) -> None:
    kind = message.metadata.message_type
    require(kind == wanted, f"messages of type {kind[:40]!r} are not taken")
    require(message.metadata.dst_node_id == context.node_id, "the order is for another node")


def _due(charge: float, credit: float) -> float:
    """Return what of a charge is still to be paid: never nothing."""
    return max(charge - credit, 0.01 * charge)


def _begun(population: Population, name: str, epsilon: float | None) -> Run:
    try:
        return population.start_run(name, epsilon=epsilon)
    except BudgetExceededError as error:
        if epsilon is None or float(error.left_mu2[0]) <= 0.0:
            raise
        raise SiteRefusal(f"epsilon={epsilon:g} of a run is more than the site has left") from error


def _reserved(run: Run, policy: SitePolicy, order: wire.Order, credit: float) -> Granted:
    charge = policy.charge(order)
    asked = _due(charge, credit)
    reservation = run.reserve(order.round_index, [0], asked)
    # At the very end of an allowance a hair less is granted than was asked.
    paid = 1.0 - max(0.0, asked - float(reservation.charges_mu2[0])) / charge
    return order.clip * math.sqrt(paid), lambda digest: run.settle(reservation, digest)


def _unbounded(run: Run, order: wire.Order) -> Granted:
    index = order.round_index
    return math.inf, lambda digest: run.record_unbounded(index, [0], digest)


def _what_may_leave(reply: Message, order: wire.Order, policy: SitePolicy, limit: float) -> Any:
    """Return a reply made anew of what the policy lets out of the app's."""
    if reply.has_error():
        return wire.pack_reply(order.token, None)
    given = wire.unpack_reply(reply.content, 1 << 40)
    if given.failed:
        return wire.pack_reply(order.token, None)
    arrays = given.arrays
    if math.isfinite(limit):
        arrays = wire.bounded(order.compression, arrays, order.size or None, limit)
    sent = policy.may_send
    return wire.pack_reply(
        order.token,
        arrays,
        num_examples=given.num_examples if "count" in sent else None,
        loss=given.loss if "loss" in sent else None,
        monitor=given.monitor if "monitor" in sent else None,
    )


def _row_of(reply: Message, order: wire.Order) -> Any:
    """Return what a client measures, and nothing else of the app's reply."""
    row = wire.read_row("" if reply.has_error() else wire.unpack_reply(reply.content, 0).row)
    return wire.pack_reply(order.token, {}, row=row)


def _told(message: Message, order: wire.Order) -> dict[str, Any]:
    """Return what an order says of itself: the server's run, the round, the model's SHA-256."""
    require(len(order.run) <= _LONGEST_NAME, _UNUSUAL)
    arrays = message.content.array_records.get("arrays")
    vectors = [] if arrays is None else [array.data for array in arrays.values()]
    received = hashlib.sha256(b"".join(vectors)).hexdigest()
    return {"run": printable(order.run), "round": order.round_index, "received": received}


def _digest(content: Any) -> str:
    """Return what stands for a reply in the account; its token makes every reply another one."""
    digest = hashlib.sha256(wire.reply_token(content).encode())
    for record in content.array_records.values():
        for name, array in record.items():
            digest.update(name.encode())
            digest.update(array.data)
    return digest.hexdigest()
