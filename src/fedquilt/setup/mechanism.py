"""Which parts each mode is made of.

| mode | clip | noise | weights | may claim |
|---|---|---|---|---|
| fedavg | none | none | examples | nothing |
| fixed_dp | fixed, covered slice | once on the mean, flat budget | equal | a bound if all covered |
| quap_fl | raw percentile, covered slice | once on the mean, cohort's budget | equal | nothing |
| quap_fl_client | raw percentile, whole vector | on each client, its own budget | equal | nothing |
| certified | per client, from its allowance | once on the sum, everything | equal | a bound |
| fednum | none | none | none: tables laid end to end | nothing |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedquilt.aggregation import RunningMean
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.optional import require
from fedquilt.common.quorum import fewest
from fedquilt.config import CondenseConfig, RunConfig
from fedquilt.config.modes import CHOSEN_ON, MODE_TABLE, recipe_line
from fedquilt.config.option import OWN
from fedquilt.method import Method
from fedquilt.models.features import choice_note
from fedquilt.population import CohortSelector
from fedquilt.privacy.accounting import Adjacency, calibrate, gaussian_mu
from fedquilt.privacy.certified import AmplifiedCertified, Certified, CertifiedSettings
from fedquilt.privacy.clip import FixedClipper, PrivateQuantile, QuantileClipper
from fedquilt.privacy.mechanism import Mechanism, NoPrivacy
from fedquilt.privacy.noise import BandedNoise, NoiseSource, noise_source
from fedquilt.privacy.policies import AdaptivePrivacyAllocator, Policy, make_policy
from fedquilt.privacy.quap_mechanisms import ClientNoise, LayerNoise
from fedquilt.privacy.run_account import RunAccount
from fedquilt.privacy.secure import MaskedCertified, SecureCertified, SecureSettings, variance_for
from fedquilt.privacy.statement import Coverage
from fedquilt.training import FlatModel


def check_mode(config: RunConfig, flat: FlatModel, num_clients: int) -> None:
    """Refuse a model that the mode cannot take, before anything is written."""
    if MODE_TABLE[config.mode].noised and not isinstance(config, CondenseConfig):
        refuse_buffers(flat, config.mode)
    if config.secure_aggregation != "off":
        _check_secure(config, flat.vector.numel(), config.cohort_limit(num_clients))
    if MODE_TABLE[config.mode].by_layer:
        covered = flat.matching(config.patterns("noise_layers"))
        whole = len(covered) == len(flat.segments)
        if config.is_bounded(covered=whole):
            _check_fixed_cost(config)


def _check_secure(config: RunConfig, size: int, count: int) -> None:
    """Refuse cohorts that can never be summed, and models that are too large to be rounded."""
    if config.secure_aggregation == "protocol":
        require("cryptography", "secure_aggregation='protocol'")
    if count < 2:
        raise InvalidValueError(
            f"clients_per_round={config.clients_per_round} must be two clients at least under "
            "secure_aggregation: masks hide nothing of the sum of one"
        )
    if fewest(count, config.least_survivors, config.colluding_clients) > count:
        raise InvalidValueError(
            f"colluding_clients={config.colluding_clients} must be at most {count - 1} of "
            f"{count} clients a round: one at least must be honest"
        )
    if isinstance(config, CondenseConfig):
        return  # clients send tables; how large they are is known when they are made
    # The smallest charge of a typical join under any policy.
    moved = Adjacency.of(config.adjacency).sensitivity_factor
    charge = (gaussian_mu(config.epsilon, config.delta) / moved) ** 2 / config.num_releases
    if config.policy == "paper":
        charge /= (1 + config.budget_alpha) ** 2
    variance_for(size, charge)


def _check_fixed_cost(config: RunConfig) -> None:
    """Refuse a fixed budget of which not even one round keeps to epsilon.

    The classic noise formula is too weak for large epsilon, so that a release at
    epsilon / rounds may cost more than the whole of epsilon.
    """
    multiplier = make_allocator(config).compute_noise_multiplier(
        config.epsilon / config.num_releases, 1.0
    )
    moved = Adjacency.of(config.adjacency).sensitivity_factor
    if moved / multiplier > gaussian_mu(config.epsilon, config.delta):
        raise InvalidValueError(
            f"epsilon={config.epsilon:g} in num_rounds={config.num_rounds} must leave a round less "
            "than all of it; the classic noise formula does not hold there: use more rounds"
        )


Build = Callable[["MechanismParts"], Mechanism]
"""Makes a mechanism from the parts of a run; a user may bring one."""


@dataclass(frozen=True, eq=False)
class MechanismParts:
    """What a mechanism is made from.

    Parameters
    ----------
    config : RunConfig
        The run's settings.
    flat : FlatModel
        Names and layout of what travels.
    method : Method
        What is released, and what the statement must say of it.
    selector : CohortSelector
        Who may be there, and how many on average: public knowledge.
    account : RunAccount, optional
        The run's account in a ledger; None for a run that claims nothing.
    sum_sensitivity : float
        That of the method's sums, where it is known.
    """

    config: RunConfig
    flat: FlatModel
    method: Method
    selector: CohortSelector
    account: RunAccount | None
    sum_sensitivity: float = 1.0


def make_mechanism(
    parts: MechanismParts, build: Build | type[Certified] | None = None
) -> Mechanism:
    """Build the mechanism of the run's mode, or the user's own.

    A subclass of `Certified` takes its place in mode `certified`, with the same parts.
    """
    mode = parts.config.mode
    if parts.method.clients_train and MODE_TABLE[mode].noised:
        refuse_buffers(parts.flat, mode)  # else only the server trains
    if build is None:
        return MECHANISMS[mode](parts)
    if parts.config.secure_aggregation != "off":
        raise InvalidValueError(
            f"secure_aggregation={parts.config.secure_aggregation!r} must be 'off' with a "
            "mechanism of your own: clients round and noise as the package's own does"
        )
    if isinstance(build, type):
        if mode != "certified" or parts.selector.secret:
            raise InvalidValueError(
                f"mechanism={build.__name__} must be used with mode='certified' and without "
                "amplification, whose accounting it has"
            )
        return make_certified(parts, build)
    return build(parts)


def make_plain(parts: MechanismParts) -> Mechanism:
    """Build the mechanism of a run without privacy."""
    return NoPrivacy(parts.method.released, parts.config.delta, parts.method.notes)


def make_quap_mechanism(parts: MechanismParts) -> Mechanism:
    """Build `fixed_dp`, `quap_fl` or `quap_fl_client`."""
    config, flat = parts.config, parts.flat
    patterns = ("all",) if config.mode == "quap_fl_client" else config.patterns("noise_layers")
    kind = ClientNoise if config.mode == "quap_fl_client" else LayerNoise
    fixed = config.mode == "fixed_dp"
    return kind(
        make_allocator(config),
        FixedClipper(config.clip_norm) if fixed else make_clipper(config),
        make_coverage(flat, patterns),
        noise_source(config.noise_seed, flat.vector.device),
        num_clients=parts.selector.availability.num_clients,
        warmup_rounds=config.warmup_rounds,
        max_agg_norm=config.max_agg_norm,
        clip_is_public=fixed,
        adjacency=Adjacency.of(config.adjacency),
        notes=front_notes(config, flat),
    )


def recipe_of(config: RunConfig, flat: FlatModel) -> str | None:
    """Say that a run follows the recipe, and why it is as it is; None where it does not."""
    named = getattr(flat.module, "made_as", None) if config.model == OWN else config.model
    return recipe_line({**config.as_dict(), "model": named})


def front_notes(config: RunConfig, flat: FlatModel) -> tuple[str, ...]:
    """Say on which data the settings of a model's frozen front were chosen."""
    chosen_on = getattr(flat.module, "chosen_on", ())
    notes = [choice_note("the settings of the model's frozen front", chosen_on, config.dataset)]
    if recipe_of(config, flat) is not None:
        notes.append(choice_note("rules for windows, clip and width", CHOSEN_ON, config.dataset))
    return tuple(note for note in notes if note is not None)


def evaluation_notes(config: RunConfig) -> tuple[str, ...]:
    """Say what is published of the clients' own measures."""
    if config.evaluation_share == 0:
        return ()
    return (
        "a noised mean of what clients measure on their own samples is published; its cost, "
        f"{config.evaluation_share:g} of the budget at most, is included",
    )


def make_certified(parts: MechanismParts, kind: type[Certified] = Certified) -> Certified:
    """Build `certified` for the budget that the ledger gives this run."""
    config, method, selector, account = parts.config, parts.method, parts.selector, parts.account
    if account is None:
        raise InvalidValueError("mode='certified' needs a ledger")
    num_clients = selector.availability.num_clients
    own = front_notes(config, parts.flat) if method.clients_train else ()
    settings = CertifiedSettings(
        tensor_names=method.released,
        frozen_names=method.frozen,
        delta=account.population.info.delta,
        clip_norm=config.clip_norm,
        clip_cap=config.clip_cap,
        divisor=selector.expected_cohort,
        normalise=config.normalise_updates,
        sliced=method.holds_parts,
        notes=(*own, *method.notes, *evaluation_notes(config)),
        adjacency=account.adjacency,
        sum_sensitivity=parts.sum_sensitivity,
        window=selector.window,
    )
    # Correlated noise remembers earlier rounds on the host, and is drawn there.
    device = parts.flat.vector.device if config.noise_bands == 1 else None
    source = noise_source(config.noise_seed, device)
    noise = BandedNoise(source, config.noise_bands)
    if selector.secret:
        return make_amplified(config, settings, noise, selector, account)
    policy = make_policy(
        config.policy,
        account.budget_mu2,
        config.num_releases,
        expected_rate=selector.expected_cohort / num_clients,
        max_joins=config.max_joins,
        allocator=make_allocator(config),
        warmup_rounds=config.warmup_rounds,
    )
    if config.secure_aggregation != "off":
        return make_secure(parts, settings, policy, source)
    quantile = None
    if config.clipping == "quantile":
        # A bit noise of twice the noise multiplier leaves 15/16 of a join to the update.
        quantile = PrivateQuantile(
            config.clip_norm,
            config.private_quantile,
            config.private_quantile_lr,
            bit_noise_std=2.0 / math.sqrt(policy.expected_charge),
            expected_cohort=selector.expected_cohort,
        )
    return kind(settings, policy, noise, quantile, num_clients)


def make_secure(
    parts: MechanismParts, settings: CertifiedSettings, policy: Policy, source: NoiseSource
) -> SecureCertified:
    """Build `certified` with the noise of the clients."""
    config, total = parts.config, parts.method.new_sum()
    if type(total) is not RunningMean or parts.method.holds_parts:
        raise InvalidValueError(
            f"secure_aggregation={config.secure_aggregation!r} must be 'off' with "
            f"{type(parts.method).__name__}: a server that sees masked vectors can only add them up"
        )
    secure = secure_settings(config, total.total.numel(), policy.expected_charge)
    count = parts.selector.availability.num_clients
    kind, remote = SecureCertified, parts.method.remote
    if remote is not None and not secure.simulated:
        kind, remote.secure = MaskedCertified, secure
    return kind(settings, policy, BandedNoise(source), secure, count)


def secure_settings(config: RunConfig, size: int, charge: float) -> SecureSettings:
    """Return the public numbers of secure aggregation for vectors of a size."""
    return SecureSettings(
        size=size,
        variance=variance_for(size, charge),
        share=config.least_survivors,
        colluding=config.colluding_clients,
        simulated=config.secure_aggregation == "simulated",
    )


def check_untouched(account: RunAccount) -> None:
    """Refuse clients that other runs have charged, or a part of their allowance only."""
    elsewhere = account.spent_elsewhere()
    whole = account.population.info.epsilon
    begins = not account.joins().any()  # later on, whoever was touched simply takes no part
    if (begins and elsewhere.max() > 0) or account.run.info.epsilon != whole:
        raise InvalidValueError(
            "amplification=True needs clients with an untouched account and takes their whole "
            f"allowance, epsilon {whole:g}: subsampled releases cannot share an account with others"
        )


def make_amplified(
    config: RunConfig,
    settings: CertifiedSettings,
    noise: BandedNoise,
    selector: CohortSelector,
    account: RunAccount,
) -> AmplifiedCertified:
    """Build `certified` under the selector's secret coin; accounts must be untouched."""
    check_untouched(account)
    exposures = config.num_rounds
    if config.policy == "cap" and config.max_joins is not None:
        exposures = min(exposures, config.max_joins)
    multiplier = calibrate(
        config.epsilon,
        settings.delta,
        rounds=exposures,
        sampling_rate=selector.sampling_rate,
        method="pld",
        adjacency=settings.adjacency,
    )
    return AmplifiedCertified(
        settings,
        noise,
        noise_multiplier=multiplier,
        sampling_rate=selector.sampling_rate,
        max_exposures=exposures,
        exposures=account.joins,
        whole_allowance=account.budget_mu2,
        num_clients=selector.availability.num_clients,
    )


def make_allocator(config: RunConfig) -> AdaptivePrivacyAllocator:
    """Build the budget rule; `fixed_dp` has a flat one (alpha = 0)."""
    return AdaptivePrivacyAllocator(
        epsilon_base=config.epsilon / config.num_releases,
        alpha=0.0 if config.mode == "fixed_dp" else config.budget_alpha,
        beta=config.budget_beta,
        delta=config.delta,
    )


def make_clipper(config: RunConfig) -> QuantileClipper:
    """Build the clip rule of the QuAP-FL paper (Algorithm 1).

    Its first bound is the first round's target.
    """
    return QuantileClipper(
        quantile=config.clip_quantile,
        momentum=config.clip_momentum,
        min_clip=config.min_clip,
        max_clip=config.max_clip,
    )


def make_coverage(flat: FlatModel, patterns: tuple[str, ...]) -> Coverage:
    """Cover the parameters that match the patterns."""
    tensors = [(segment.name, segment.start, segment.stop) for segment in flat.segments]
    chosen = [segment.name for segment in flat.matching(patterns)]
    return Coverage.make(flat.vector.numel(), tensors, chosen)


def refuse_buffers(flat: FlatModel, mode: str) -> None:
    """Refuse statistics that training moves, such as BatchNorm's, outside fedavg.

    They would be one more release; clipping and noising them as if they were
    weights makes no sense, and leaving them behind would be silent.
    """
    if flat.buffer_names:
        raise InvalidValueError(
            f"mode={mode!r} must not be used with buffers that training changes "
            f"({', '.join(flat.buffer_names)}); use GroupNorm instead of BatchNorm, or fedavg"
        )


MECHANISMS: Mapping[str, Build] = {
    "fedavg": make_plain,
    "fixed_dp": make_quap_mechanism,
    "quap_fl": make_quap_mechanism,
    "quap_fl_client": make_quap_mechanism,
    "certified": make_certified,
    "fednum": make_plain,
}
"""The mechanism of each mode."""
