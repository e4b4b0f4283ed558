"""`RunConfig`: everything that decides a run, in one flat frozen record.

A field is at once a key of the TOML file (`batch_size = 32`), an option of the
command line (`--batch-size 32`) and a keyword of `fedquilt.run(batch_size=32)`.
The defaults declared here are those of the QuAP-FL API document; `build_config` puts
those of the mode over them (`fedquilt.config.modes`).  Validation happens at construction,
so a `RunConfig` that exists is valid.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config import choices
from fedquilt.config.modes import (
    DEFAULT_MODE,
    MODE_TABLE,
    MODES,
    NOISED_MODES,
    SLICED_MODES,
    Claim,
)
from fedquilt.config.option import (
    CLIENTS,
    OWN,
    OWN_CLIENTS,
    SPLIT,
    AnyBut,
    Case,
    Flag,
    checked,
    declare,
    kinds_of,
)

F = Flag

# The panels of the help, in the words of what somebody wants to do.
_DATA, _POPULATION = "Choose data and deal them to clients", "Say who takes part"
_TRAINING, _SLICES = "Train", "Let clients train a part of the model"
_PRIVACY = "Promise privacy"
_LEDGER, _RUN = "Keep a ledger over several runs", "Run, evaluate, keep"

# The cases in which options have an effect; see `declare`.
_QUAP = ("quap_fl", "quap_fl_client")
_BY_LAYER = tuple(name for name, mode in MODE_TABLE.items() if mode.by_layer)
_CLAIMING = ("fixed_dp", "certified")
_SLICED = tuple(name for name in choices.METHODS if name != "full")
OF_SPLIT: tuple[Case, ...] = ({CLIENTS: (SPLIT,)},)
CERTIFIED: tuple[Case, ...] = ({"mode": ("certified",)},)
_BUDGETED: tuple[Case, ...] = ({"mode": _QUAP}, {"mode": ("certified",), "policy": ("paper",)})
_QUANTILE: tuple[Case, ...] = ({"mode": ("certified",), "clipping": ("quantile",)},)
_ATTACKED: tuple[Case, ...] = ({"attack": AnyBut(("none",))},)
_CLIPPED: Case = {"mode": ("fedavg",), "aggregation": ("norm_bound", "centred_clipping")}
_SECURE: tuple[Case, ...] = (
    {"mode": ("certified",), "secure_aggregation": ("simulated", "protocol")},
)
_IN_LEDGER: Case = {"ledger": None}
_BUFFERED: tuple[Case, ...] = ({"buffer_size": None},)

_BOTH = F.COMMON | F.COMMON_CONDENSE
# Squares and quotients of smaller bounds leave the range in which float32 has all its digits.
_FLOOR = 1e-30


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run of one mode on one data set."""

    # A table of options: one argument a line would take four screens more.
    # fmt: off
    dataset: str = declare(
        "digits", _DATA,
        "digits, mnist, fashion-mnist, cifar10, mnist-writers, cifar100, tiny-imagenet, femnist, "
        "shakespeare.", _BOTH | F.APP)
    data_dir: str | None = declare(
        None, _DATA, "Data folders, joined by ':' (or FEDQUILT_DATA).",
        F.EXECUTION | _BOTH | F.OPERATOR, uses=OF_SPLIT)
    no_download: bool = declare(
        False, _DATA, "Refuse to download missing data.", F.EXECUTION | F.APP, uses=OF_SPLIT)
    partition: str = declare(
        "dirichlet", _DATA, "Split: dirichlet, iid, shards, part, writer.", _BOTH | F.APP,
        choices=choices.PARTITIONS, uses=OF_SPLIT)
    dirichlet_alpha: float = declare(
        0.5, _DATA, "Concentration of the Dirichlet split; small is more skewed.",
        F.COMMON_CONDENSE | F.APP, above=0,
        uses=({CLIENTS: (SPLIT,), "partition": ("dirichlet", "part")},))
    classes_per_client: int = declare(
        2, _DATA, "Classes a client holds with --partition shards or part.", F.APP, at_least=1,
        uses=({CLIENTS: (SPLIT,), "partition": ("shards", "part")},))

    num_clients: int | None = declare(
        None, _POPULATION, "Number of clients; 100, or all writers of the writer split.",
        _BOTH | F.OPERATOR, at_least=1)
    allow_overlap: bool = declare(
        False, _POPULATION, "Let your own clients hold the same samples; the statement says so.",
        uses=({CLIENTS: (OWN_CLIENTS,)},))
    clients_per_round: int | float = declare(
        0.3, _POPULATION, "Most clients of a round: 30, or a share, 0.3.", F.NODES | _BOTH)
    availability: str = declare(
        "beta", _POPULATION,
        "Who is there: always, beta (long tail), uniform, or FILE.csv (round,client).", F.COMMON)
    selection: str = declare(
        "uniform", _POPULATION,
        "Who is picked among them: uniform or weighted (Beta) without replacement, a poisson coin, "
        "or who has spent least energy.", F.NODES, choices=choices.SELECTIONS)
    energy: str | None = declare(
        None, _POPULATION,
        "FILE.csv (client,joules,battery,charge): what a round costs each client; without charge "
        "it is not there.", F.NOT_CONDENSE | F.OPERATOR)

    buffer_size: int | None = declare(
        None, _POPULATION,
        "Asynchronous rounds (FedBuff): release when so many updates have come; absent: rounds.",
        F.NOT_CONDENSE, at_least=1)
    in_flight: int | None = declare(
        None, _POPULATION, "Clients at work at the same time; absent: twice the buffer.",
        F.NOT_CONDENSE, at_least=1, uses=_BUFFERED)
    device_spread: float = declare(
        1.0, _POPULATION, "Deviation of the logarithm of the seconds that devices take.",
        F.NOT_CONDENSE | F.OPERATOR, at_least=0, uses=_BUFFERED)

    mode: str = declare(
        DEFAULT_MODE, _PRIVACY,
        "certified: a bound for every client; fedavg: none; of the QuAP-FL papers: fixed_dp, "
        "quap_fl, quap_fl_client.", F.NODES | _BOTH, choices=MODES)
    model: str = declare(
        "auto", _TRAINING,
        "hog-, scatter-, hog-drawn-linear, drawn-linear-16 to -512, linear, mlp, digits, mnist, "
        "cifar10, lenet, exits, convnet, resnet18, lstm, or auto: the data set's.",
        _BOTH | F.APP | F.PARAMETER)
    trainable: str = declare(
        "all", _TRAINING, "Patterns of parameter names, joined by commas; the rest is frozen.",
        F.NODES | F.COMMON | F.NOT_CONDENSE)
    num_rounds: int = declare(200, _TRAINING, "Communication rounds.", F.NODES | _BOTH, at_least=1)
    local_epochs: int = declare(
        5, _TRAINING, "Epochs of a client in a round.", F.NODES | F.COMMON | F.NOT_CONDENSE,
        at_least=1)
    batch_size: int = declare(
        32, _TRAINING, "Batch size of local training.", F.NODES | F.COMMON, at_least=1)
    learning_rate: float = declare(
        0.01, _TRAINING, "Local learning rate in round 0.", F.COMMON | F.NOT_CONDENSE, above=0)
    lr_decay: float = declare(
        1.0, _TRAINING, "Factor on the local learning rate each round.", F.NOT_CONDENSE, above=0,
        at_most=1, uses=({"lr_schedule": ("exponential", "step")},))
    lr_schedule: str = declare(
        "exponential", _TRAINING,
        "How it moves over the rounds: by lr_decay each round, not at all, as half a cosine to 0, "
        "or by lr_decay every lr_step_rounds.", F.NOT_CONDENSE, choices=choices.LR_SCHEDULES)
    lr_step_rounds: int = declare(
        10, _TRAINING, "Rounds between two steps of it.", F.NOT_CONDENSE, at_least=1,
        uses=({"lr_schedule": ("step",)},))
    lr_warmup_rounds: int = declare(
        0, _TRAINING, "Rounds at the start in which it rises to its value.", F.NOT_CONDENSE,
        at_least=0)
    loss: str = declare(
        "auto", _TRAINING,
        "What clients minimise; auto: cross-entropy for classes, squared error for numbers; "
        "model: the loss that the model returns.", F.NODES | F.NOT_CONDENSE | F.PARAMETER,
        choices=choices.LOSSES, own=True)
    ignore_index: int = declare(
        -100, _TRAINING, "Target that a loss of classes leaves out, such as padding.",
        F.NODES | F.NOT_CONDENSE, at_least=-(2**31))
    metrics: str = declare(
        "auto", _TRAINING,
        "Measured on the test data, joined by commas, the headline first: accuracy, top<k>, auroc, "
        "f1, mse, mae, perplexity; auto: what fits the loss.", F.PARAMETER, own=True)
    optimizer: str = declare(
        "sgd", _TRAINING, "How clients step.", F.NODES | F.NOT_CONDENSE | F.PARAMETER,
        choices=choices.CLIENT_OPTIMIZERS, own=True)
    momentum: float = declare(
        0.0, _TRAINING, "Momentum of --optimizer sgd and nesterov.", F.NODES | F.NOT_CONDENSE,
        at_least=0, below=1, uses=({"optimizer": ("sgd", "nesterov")},))
    weight_decay: float = declare(
        0.0, _TRAINING, "Weight decay of clients; decoupled with adamw.", F.NODES | F.NOT_CONDENSE,
        at_least=0)
    gradient_clip: float | None = declare(
        None, _TRAINING, "Largest norm of a batch's gradient on a client; absent is none.",
        F.NODES | F.NOT_CONDENSE, above=0)
    fedprox_mu: float = declare(
        0.0, _TRAINING, "Strength of the FedProx term; 0 is off.", F.NODES | F.NOT_CONDENSE,
        at_least=0)
    correction: str = declare(
        "none", _TRAINING,
        "Against the drift of clients with skewed data: none, scaffold, feddyn, fednova (fedavg "
        "only).", F.NOT_CONDENSE, choices=choices.CORRECTIONS)
    feddyn_alpha: float = declare(
        0.1, _TRAINING, "Strength of FedDyn's dynamic term (alpha).", F.NOT_CONDENSE, above=0,
        uses=({"mode": ("fedavg",), "correction": ("feddyn",)},))
    server_optimizer: str = declare(
        "sgd", _TRAINING, "How the server applies the mean.", F.COMMON | F.NOT_CONDENSE,
        choices=choices.SERVER_OPTIMIZERS)
    server_lr: float | None = declare(
        None, _TRAINING, "Server learning rate; 1 for sgd and momentum, 0.01 otherwise.",
        F.NOT_CONDENSE, above=0, limit=1e300)
    server_momentum: float = declare(
        0.9, _TRAINING, "Momentum of --server-optimizer momentum.", F.NOT_CONDENSE, at_least=0,
        below=1, uses=({"server_optimizer": ("momentum",)},))
    average_late: float = declare(
        0.0, _TRAINING,
        "Share of the releases, at the end, whose models are averaged into the last one; costs no "
        "privacy.", F.NOT_CONDENSE, at_least=0, at_most=1)

    personal: str = declare(
        "none", _TRAINING,
        "What each client has for itself: none, a part of the model (fedper, fedrep), a model near "
        "the shared one (ditto), or that one fine-tuned (finetune).", F.NOT_CONDENSE,
        choices=choices.PERSONAL)
    personal_layers: str | None = declare(
        None, _TRAINING,
        "Patterns of parameter names, joined by commas, that stay with the client; absent: the "
        "last layer.", F.NOT_CONDENSE, uses=({"personal": ("fedper", "fedrep")},))
    personal_epochs: int = declare(
        1, _TRAINING, "Epochs of what a client trains for itself alone.", F.NOT_CONDENSE,
        at_least=1, uses=({"personal": ("fedrep", "ditto", "finetune")},))
    ditto_lambda: float = declare(
        0.1, _TRAINING, "How strongly Ditto pulls own models to the shared one.", F.NOT_CONDENSE,
        at_least=0, uses=({"personal": ("ditto",)},))
    compression: str = declare(
        "none", _TRAINING,
        "How updates travel: none, bf16, int8, qsgd (4 bits), sign, topk, randomk, ternary; what "
        "the last four leave out is sent later.", F.NOT_CONDENSE, choices=choices.COMPRESSIONS)
    compression_share: float = declare(
        0.1, _TRAINING, "Share of the numbers that topk, randomk and ternary send.",
        F.NOT_CONDENSE, above=0, at_most=1,
        uses=({"compression": ("topk", "randomk", "ternary")},))
    aggregation: str = declare(
        "mean", _TRAINING,
        "What the server makes of the updates: mean, or against hostile clients median, "
        "trimmed_mean, krum, multi_krum, geometric_median, norm_bound, centred_clipping, majority "
        "(of signs; fedavg only).", F.NOT_CONDENSE, choices=choices.AGGREGATIONS)
    byzantine_fraction: float = declare(
        0.2, _TRAINING, "Share of a cohort that may be hostile, for trimmed_mean and (multi_)krum.",
        F.NOT_CONDENSE, at_least=0, below=0.5,
        uses=({"mode": ("fedavg",), "aggregation": ("trimmed_mean", "krum", "multi_krum")},))
    attack: str = declare(
        "none", _TRAINING,
        "Simulate hostile clients: none, sign_flip, scaling, label_flip, backdoor, "
        "little_is_enough, inner_product.", F.NOT_CONDENSE | F.OPERATOR, choices=choices.ATTACKS)
    attackers: float = declare(
        0.2, _TRAINING, "Share of all clients that are hostile.", F.NOT_CONDENSE | F.OPERATOR,
        at_least=0, at_most=1, uses=_ATTACKED)
    attack_strength: float | None = declare(
        None, _TRAINING, "Factor on what they send; absent: the attack's usual one.",
        F.NOT_CONDENSE | F.OPERATOR, above=0, uses=_ATTACKED)

    method: str = declare(
        "full", _SLICES,
        "full, heterofl, fedrolex, fjord, dropout, mfl, fiarse, depthfl, scalefl, smallest, "
        "largest, largest_only, hetlora, flexlora, fedsb (usually fedavg).",
        F.NODES | F.COMMON | F.NOT_CONDENSE | F.PARAMETER,
        choices=choices.METHODS, own=True)
    tiers: str = declare(
        "1,1/2,1/4,1/8", _SLICES,
        "Widths dealt to clients, or FILE.csv (client,width or client,memory_mb,flops).",
        F.NODES | F.COMMON | F.NOT_CONDENSE, uses=({"method": _SLICED},))
    whole: str | None = declare(
        None, _SLICES,
        "Patterns of module names, joined by commas, that every client holds at full width.",
        F.NODES, uses=({"method": (*choices.NARROW_METHODS, "smallest")},))
    absent_classes: str = declare(
        "average", _SLICES,
        "HeteroFL's output rows of classes that a client lacks: in the mean, or left out of it "
        "(usual in fedavg, and only there).", F.NODES, choices=choices.ABSENT_CLASSES,
        uses=({"mode": ("fedavg",), "method": ("heterofl",)},))
    fjord_alpha: float = declare(
        0.5, _SLICES, "Share of the distilled part in the loss of FjORD's narrow passes.", F.NODES,
        at_least=0, at_most=1, uses=({"method": ("fjord",)},))
    fjord_temperature: float = declare(
        1.0, _SLICES, "Temperature of that distillation.", F.NODES, above=0,
        uses=({"method": ("fjord",)},))
    depthfl_rampup: int = declare(
        0, _SLICES,
        "Rounds in which the weight of DepthFL's distillation rises to 1; 0: it is 1 at once.",
        F.NODES, at_least=0, uses=({"method": ("depthfl",)},))
    norm_statistics: str = declare(
        "clients", _SLICES,
        "Whose inputs give BatchNorm its statistics before an evaluation: everybody's (fedavg "
        "only), or the server's own, a validation split.", F.NODES, choices=choices.NORM_STATISTICS,
        uses=({"method": choices.NARROW_METHODS},))

    epsilon: float = declare(
        3.0, _PRIVACY, "What the run may take from a client.", F.NODES | _BOTH, above=0, limit=1e4,
        uses=({"mode": NOISED_MODES}, _IN_LEDGER))
    delta: float = declare(
        1e-5, _PRIVACY, "Its delta.", F.NODES | _BOTH, above=0, below=1,
        uses=({"mode": NOISED_MODES}, _IN_LEDGER))
    adjacency: str = declare(
        "zero_out", _PRIVACY,
        "A client's data against nothing (zero_out) or, at twice the noise, any others "
        "(replace_one).", F.NODES | _BOTH, choices=choices.ADJACENCIES,
        uses=({"mode": _CLAIMING}, _IN_LEDGER))
    budget_alpha: float = declare(
        0.5, _PRIVACY, "Strength of the participation-adaptive budget (alpha).", F.NOT_CONDENSE,
        at_least=0, uses=_BUDGETED)
    budget_beta: float = declare(
        2.0, _PRIVACY, "Decay of the participation-adaptive budget (beta).", F.NOT_CONDENSE,
        above=0, uses=_BUDGETED)
    warmup_rounds: int = declare(
        0, _PRIVACY, "Rounds at the start with the fixed base budget.", F.NOT_CONDENSE, at_least=0,
        uses=_BUDGETED)
    participation_ema: float | None = declare(
        None, _PRIVACY,
        "Rate of the moving average of participation (eq. 3); absent is the cumulative mean.",
        F.NOT_CONDENSE, above=0, at_most=1, uses=({"mode": _QUAP},))
    clip_norm: float = declare(
        1.0, _PRIVACY, "Bound on the length of an update.", F.NODES | F.COMMON, above=0,
        floor=_FLOOR, uses=({"mode": _CLAIMING}, _CLIPPED))
    clip_quantile: float = declare(
        0.9, _PRIVACY, "Quantile of the update norms that sets the clip bound.", F.NOT_CONDENSE,
        above=0, below=1, uses=({"mode": _QUAP},))
    clip_momentum: float = declare(
        0.95, _PRIVACY, "Momentum of the clip bound.", F.NOT_CONDENSE, at_least=0, below=1,
        uses=({"mode": _QUAP},))
    min_clip: float = declare(
        0.1, _PRIVACY, "Smallest clip bound.", F.NOT_CONDENSE, above=0, floor=_FLOOR,
        uses=({"mode": _QUAP},))
    max_clip: float = declare(
        10.0, _PRIVACY, "Largest clip bound.", F.NOT_CONDENSE, above=0, floor=_FLOOR,
        uses=({"mode": _QUAP},))
    max_agg_norm: float = declare(
        10000.0, _PRIVACY, "Largest norm of the noised mean update; not used by fedavg.",
        F.NOT_CONDENSE, above=0, uses=({"mode": ("fixed_dp", *_QUAP)},))
    noise_layers: str = declare(
        "fc*", _PRIVACY, "Noised tensors: comma-separated patterns of parameter names, or all.",
        F.NODES | F.NOT_CONDENSE, uses=({"mode": _BY_LAYER},))
    noise_seed: int | None = declare(
        None, _PRIVACY, "Reproducible noise, which protects nobody; absent is secret.",
        F.REPETITION, at_least=0, limit=2**63 - 1, uses=({"mode": NOISED_MODES},))

    policy: str = declare(
        "adaptive", _PRIVACY, "How epsilon is spread over a client's joins.", F.NODES | F.COMMON,
        choices=choices.POLICIES, uses=CERTIFIED)
    max_joins: int | None = declare(
        None, _PRIVACY, "Most joins of a client, for --policy cap.", F.NODES | F.COMMON, at_least=1,
        uses=({"mode": ("certified",), "policy": ("cap",)},))
    clipping: str = declare(
        "fixed", _PRIVACY, "fixed at --clip-norm, or a private quantile from there.", F.COMMON,
        choices=choices.CLIPPINGS, uses=CERTIFIED)
    private_quantile: float = declare(
        0.5, _PRIVACY, "Quantile that --clipping quantile follows.", above=0, below=1,
        uses=_QUANTILE)
    private_quantile_lr: float = declare(
        0.2, _PRIVACY, "How fast it follows.", above=0, at_most=2, uses=_QUANTILE)
    clip_cap: float = declare(
        4.0, _PRIVACY, "No client is clipped above this multiple of the bound.", at_least=1,
        uses=CERTIFIED)
    normalise_updates: bool = declare(
        False, _PRIVACY, "Scale every update to exactly its clip, not only down to it.",
        uses=CERTIFIED)
    noise_bands: int = declare(
        1, _PRIVACY, "Correlate noise over so many rounds; nobody joins twice within them.",
        at_least=1, limit=10_000, uses=CERTIFIED)
    rounds_per_release: int = declare(
        1, _PRIVACY,
        "Let the model stand still for so many rounds: whoever comes in them counts once, in one "
        "noised release.", F.NODES | F.NOT_CONDENSE, at_least=1)
    amplification: bool = declare(
        False, _PRIVACY, "Claim amplification by a secret coin (needs --selection poisson).",
        F.NODES, uses=CERTIFIED)
    secure_aggregation: str = declare(
        "off", _PRIVACY,
        "Let clients add the noise, so that nobody trusts the server: simulated computes what the "
        "protocol would release, protocol runs it, keys and masks included.",
        choices=choices.SECURE_AGGREGATION, uses=CERTIFIED)
    least_survivors: float = declare(
        0.7, _PRIVACY,
        "Share of a round's clients, and always more than half, that must answer before their sum "
        "is opened; their noise is enough.", above=0, at_most=1, uses=_SECURE)
    colluding_clients: int = declare(
        0, _PRIVACY, "How many clients of a round may side with the server.", at_least=0,
        uses=_SECURE)
    ledger: str | None = declare(
        None, _LEDGER, "File that outlives runs: who gave away what.",
        F.REPETITION | _BOTH | F.OPERATOR)
    population: str | None = declare(
        None, _LEDGER, "The clients' name in it; absent: a digest.",
        F.REPETITION | _BOTH | F.OPERATOR, uses=(_IN_LEDGER,))
    new_population: bool = declare(
        False, _LEDGER,
        "Make a ledger or population, or let only new clients join one, though the name is near "
        "a known one or nobody is known in it.", F.REPETITION, uses=(_IN_LEDGER,))
    allowance: float | None = declare(
        None, _LEDGER, "Lifetime epsilon of new clients; absent: epsilon.", _BOTH, above=0,
        limit=1e4, uses=({"mode": _CLAIMING}, _IN_LEDGER))
    if_exhausted: str = declare(
        "refuse", _LEDGER,
        "When clients have less left than epsilon: refuse the run, or let them sit out.",
        was="on_short", choices=choices.IF_EXHAUSTED, uses=(_IN_LEDGER,))

    allow_unbounded: bool = declare(
        False, _LEDGER,
        "Let a run that claims nothing put clients of the ledger at infinity, for ever.",
        F.OPERATOR, was="spend_everything", uses=(_IN_LEDGER,))

    client_test_fraction: float = declare(
        0.0, _RUN,
        "Share of its samples that each client holds back to evaluate the model on; what it "
        "measures is for the owner.", F.NODES, at_least=0, below=1)
    evaluation_share: float = declare(
        0.0, _RUN,
        "Share of each client's budget, in certified, that pays for publishing a noised mean of "
        "what clients measure; 0 publishes nothing of it.", F.APP, at_least=0, below=1,
        uses=CERTIFIED)
    eval_every: int = declare(10, _RUN, "Evaluate every so many rounds.", _BOTH, at_least=1)
    target_accuracy: float | None = declare(
        None, _RUN, "Target shown in reports and used by early stopping.", F.REPETITION | F.APP,
        above=0, at_most=1)
    early_stopping: bool = declare(
        False, _RUN, "Stop at the target accuracy on a validation split that no client holds.",
        F.APP)
    validation_fraction: float = declare(
        0.1, _RUN, "Share of the training data in that split.", F.APP, above=0, below=1,
        uses=({CLIENTS: (SPLIT,), "early_stopping": (True,)},
              {CLIENTS: (SPLIT,), "norm_statistics": ("server",)}))
    seed: int = declare(
        0, _RUN, "Seed of everything except secret noise.", F.NODES | F.REPETITION | _BOTH,
        at_least=0, limit=2**63 - 1)
    device: str = declare(
        "auto", _RUN, "Where to train: auto, cpu, cuda, cuda:1.", F.EXECUTION | _BOTH,
        choices=choices.DEVICES, pattern=r"cuda:\d{1,3}")
    engine: str = declare(
        "auto", _RUN,
        "local: in this process; sequential: one client after the other; batched: many in one "
        "program (GPU); processes: several cores; flower, flower-ray: as nodes; auto: cheapest.",
        F.EXECUTION | F.COMMON | F.OPERATOR | F.PARAMETER, choices=choices.ENGINES, own=True)
    precision: str = declare(
        "float32", _RUN,
        "What the batched engine computes in on a GPU: float32 (products in TF32), or bf16.",
        F.NODES | F.EXECUTION, choices=choices.PRECISIONS)
    devices: str | None = declare(
        None, _RUN,
        "Devices that share each cohort, one batched engine on each: cuda:0,cuda:1, or cpu,cpu.",
        F.EXECUTION | F.APP)
    output_dir: str = declare(
        "./results", _RUN, "Where the run's folder is made.",
        F.EXECUTION | _BOTH | F.OPERATOR | F.PARAMETER)

    # fmt: on

    def __post_init__(self) -> None:
        """Check every field, then the rules that join two of them."""
        kinds = kinds_of(type(self))
        for item in dataclasses.fields(self):
            value = checked(item, getattr(self, item.name), kinds[item.name])
            object.__setattr__(self, item.name, value)
        self._check_cohort()
        self._check_certified()
        self._check_method()
        self._check_steps()
        self._check_hostile()
        self._check_correction()
        self._check_buffer()
        self._check_messages()
        self._check_personal()
        if self.max_clip <= self.min_clip:
            raise InvalidValueError(f"max_clip={self.max_clip} must be > min_clip={self.min_clip}")
        for name in ("noise_layers", "trainable"):
            if not self.patterns(name):
                raise InvalidValueError(
                    f"{name}={getattr(self, name)!r} must name at least one pattern, or be 'all'"
                )

    def _check_method(self) -> None:
        if self.method != "full" and self.mode not in SLICED_MODES:
            raise InvalidValueError(
                f"mode={self.mode!r} must be one of {', '.join(map(repr, SLICED_MODES))} with "
                f"method={self.method!r}: its noise and clip are those of whole models"
            )
        if self.absent_classes == "leave_out" and self.mode != "fedavg":
            raise InvalidValueError(
                f"absent_classes='leave_out' must be 'average' in mode={self.mode!r}: which "
                "classes a client lacks follows from its data, and under a bound no divisor may"
            )
        self._check_devices()

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        if self.engine not in ("auto", "batched"):
            raise InvalidValueError(
                f"engine={self.engine!r} must be 'auto' or 'batched' with devices={self.devices!r}"
            )
        if self.method not in choices.WHOLE_METHODS:
            raise InvalidValueError(
                f"devices={self.devices!r} must be left out with method={self.method!r}: its "
                "clients hold models of several shapes"
            )

    def _check_steps(self) -> None:
        """Check what the clients' optimiser and its learning rate ask of one another."""
        if self.momentum and self.optimizer not in ("sgd", "nesterov"):
            raise InvalidValueError(
                f"momentum={self.momentum:g} must be left out with optimizer={self.optimizer!r}: "
                "it is that of sgd and nesterov"
            )
        if self.optimizer == "nesterov" and not self.momentum:
            raise InvalidValueError("optimizer='nesterov' needs momentum > 0")
        if self.optimizer == OWN and self.weight_decay:
            raise InvalidValueError(
                f"weight_decay={self.weight_decay:g} must be left out with your own optimizer: "
                "give it to that"
            )
        if self.lr_schedule in ("constant", "cosine") and self.lr_decay != 1:
            raise InvalidValueError(
                f"lr_decay={self.lr_decay:g} must be 1 with lr_schedule={self.lr_schedule!r}, "
                "which does not use it"
            )

    def _check_hostile(self) -> None:
        """Refuse robust rules where noise or parts are made for sums, and attacks elsewhere."""
        if self.aggregation != "mean" and self.mode != "fedavg":
            raise InvalidValueError(
                f"aggregation={self.aggregation!r} must be 'mean' in mode={self.mode!r}: its noise "
                "is made for a sum of clipped updates, which one client moves by its clip at most; "
                "a rule that compares single updates moves by more. The clip itself bounds what "
                "a hostile client can do"
            )
        for name, plain in (("aggregation", "mean"), ("attack", "none")):
            if getattr(self, name) != plain and self.method != "full":
                raise InvalidValueError(
                    f"{name}={getattr(self, name)!r} must be {plain!r} with method="
                    f"{self.method!r}: it takes updates of the whole model"
                )
        if self.attack != "none" and self.engine in (*choices.FLOWER_ENGINES, OWN):
            raise InvalidValueError(
                f"attack={self.attack!r} must be 'none' with engine={self.engine!r}: attackers are "
                "simulated where the package trains clients itself"
            )

    def _check_buffer(self) -> None:
        """Refuse what cannot go with asynchronous rounds."""
        if self.buffer_size is None:
            return
        refused = (
            ("amplification", self.amplification, "a secret coin keeps who comes by itself"),
            ("rounds_per_release", self.rounds_per_release != 1, "a buffer is a window already"),
            ("selection", self.selection != "uniform", "who begins is drawn among who is there"),
            ("method", self.method != "full", "clients must train the whole model"),
            ("correction", self.correction != "none", "its formulas are those of one model"),
            ("personal", self.personal != "none", "what clients keep follows one model"),
            ("energy", self.energy is not None, "batteries are charged and drained in rounds"),
            ("secure_aggregation", self.secure_aggregation != "off", "clients of one sum must be "
             "there together"),
        )  # fmt: skip
        for name, is_wrong, why in refused:
            if is_wrong:
                raise InvalidValueError(
                    f"buffer_size={self.buffer_size} must be left out with "
                    f"{name}={getattr(self, name)!r}: {why}"
                )

    def _check_correction(self) -> None:
        """Refuse corrections where they would not be those of their papers, or cost a claim."""
        if self.correction == "none":
            return
        name = self.correction
        why = {
            "scaffold": "its clients send a second vector, longer than the first, and noise and "
            "clip are made for one",
            "feddyn": "what its server adds up over all rounds would be their noise",
            "fednova": "its step follows from how many samples clients hold, which a bound hides; "
            "normalise_updates makes all updates equally long",
        }[name]
        sgd = "its formulas are those of plain SGD"
        elsewhere = "clients keep their vectors where the package trains them one by one"
        remote = (*choices.FLOWER_ENGINES, OWN)
        one_by_one = self.engine in ("auto", "sequential")
        momentum = bool(self.momentum) and (name != "fednova" or bool(self.fedprox_mu))
        own_server = (self.server_optimizer, self.server_lr or 1.0) != ("sgd", 1.0)
        refused = (
            ("mode", self.mode != "fedavg", why),
            ("method", self.method != "full", "clients must train the whole model"),
            ("aggregation", self.aggregation != "mean", "its formulas are those of means"),
            ("optimizer", self.optimizer != "sgd", sgd),
            ("momentum", momentum, sgd),
            ("gradient_clip", self.gradient_clip is not None, sgd),
            ("fedprox_mu", bool(self.fedprox_mu) and name != "fednova", "it has its own term"),
            ("server_optimizer", name == "feddyn" and own_server, "its server has its own step"),
            ("engine", self.engine in remote if name == "fednova" else not one_by_one, elsewhere),
            ("devices", self.devices is not None and name != "fednova", elsewhere),
        )
        for option, is_wrong, reason in refused:
            if is_wrong:
                raise InvalidValueError(
                    f"correction={name!r} must be 'none' with {option}="
                    f"{getattr(self, option)!r}: {reason}"
                )

    def _check_messages(self) -> None:
        """Refuse compressions that what is sent does not survive, and steps without a length."""
        if self.aggregation == "majority" and self.server_lr is None:
            raise InvalidValueError(
                "aggregation='majority' needs server_lr: the model moves by it in every coordinate"
            )
        refused = (
            ("method", self.method != "full", "what is left out belongs to fixed places"),
            ("correction", self.correction != "none", "its formulas need what clients computed"),
            ("secure_aggregation", self.secure_aggregation != "off", "masks take all their bits"),
        )
        for option, is_wrong, reason in refused:
            if is_wrong and self.compression != "none":
                raise InvalidValueError(
                    f"compression={self.compression!r} must be 'none' with {option}="
                    f"{getattr(self, option)!r}: {reason}"
                )

    @property
    def trains_one_by_one(self) -> bool:
        """Whether each client has a loss of its own, which autograd alone trains."""
        return self.correction in ("scaffold", "feddyn") or self.personal != "none"

    def _check_personal(self) -> None:
        """Refuse personal models where clients do not train whole ones, one by one."""
        by_layer = "its noise is dealt by layers, of which some would stay with clients"
        alone = "what clients keep is where the package trains them one by one"
        refused = (
            ("mode", self.mode not in SLICED_MODES, by_layer),
            ("method", self.method != "full", "clients must train the whole model"),
            ("correction", self.correction != "none", "its formulas are those of shared models"),
            ("engine", self.engine not in ("auto", "sequential"), alone),
            ("devices", self.devices is not None, alone),
        )
        for option, is_wrong, reason in refused:
            if is_wrong and self.personal != "none":
                raise InvalidValueError(
                    f"personal={self.personal!r} must be 'none' with {option}="
                    f"{getattr(self, option)!r}: {reason}"
                )

    def _check_certified(self) -> None:
        """Check what the certified mode's options ask of one another."""
        if self.mode != "certified":
            return
        if self.noise_seed is not None and self.ledger is not None:
            raise InvalidValueError(
                f"noise_seed={self.noise_seed} must not be used with ledger={self.ledger!r}: "
                "reproducible noise protects nobody; rehearse without --ledger"
            )
        if self.policy == "cap" and self.max_joins is None:
            raise InvalidValueError("policy='cap' needs max_joins, the most joins of a client")
        if self.evaluation_share and (self.amplification or self.noise_seed is not None):
            raise InvalidValueError(
                f"evaluation_share={self.evaluation_share:g} must be 0 with amplification or a "
                "noise_seed: it is a part of a budget that noise protects"
            )
        self._check_secure()
        if not self.amplification:
            return
        if self.allowance not in (None, self.epsilon):
            raise InvalidValueError(
                f"amplification=True needs allowance={self.epsilon:g}, the run's epsilon, "
                f"not {self.allowance:g}: such a run takes a client's whole allowance"
            )
        if self.selection != "poisson":
            raise InvalidValueError(
                f"amplification=True needs selection='poisson', not {self.selection!r}: "
                "only an independent secret coin amplifies"
            )
        if self.policy not in ("worst_case", "cap"):
            raise InvalidValueError(
                f"amplification=True needs policy='worst_case' or 'cap', not {self.policy!r}: "
                "its accounting holds for a schedule that is fixed in advance"
            )
        if self.noise_seed is not None:
            raise InvalidValueError(
                f"amplification=True needs secret noise, not noise_seed={self.noise_seed}: "
                "a secret coin cannot be repeated"
            )
        if self.clipping != "fixed" or self.noise_bands != 1:
            raise InvalidValueError("amplification=True needs clipping='fixed' and noise_bands=1")
        if self.rounds_per_release != 1:
            raise InvalidValueError(
                f"amplification=True needs rounds_per_release=1, not {self.rounds_per_release}: "
                "whom a secret coin kept in a window decides whether it is tossed again"
            )

    def _check_secure(self) -> None:
        """Refuse what cannot go with sums that a server sees as a whole only."""
        if self.secure_aggregation == "off":
            return
        refused = (
            ("amplification", self.amplification, "the server would know whom its coin kept"),
            ("noise_bands", self.noise_bands != 1, "noise of earlier rounds is the server's own"),
            (
                "rounds_per_release",
                self.rounds_per_release != 1,
                "clients of one sum must be there together, to take back masks of who left",
            ),
            ("clipping", self.clipping != "fixed", "bits of a quantile are not in the sum"),
            ("evaluation_share", self.evaluation_share, "its noise is the server's own"),
            (
                "method",
                self.method not in (*choices.WHOLE_METHODS, "condense"),
                "vectors must be whole",
            ),
            ("engine", self.engine == "flower-ray", "its actors keep nothing between messages"),
        )
        for name, is_wrong, why in refused:
            if is_wrong:
                raise InvalidValueError(
                    f"secure_aggregation={self.secure_aggregation!r} must be 'off' with "
                    f"{name}={getattr(self, name)!r}: {why}"
                )

    def _check_cohort(self) -> None:
        value = self.clients_per_round
        if isinstance(value, float):
            checks.number("clients_per_round", value, above=0, at_most=1)
            return
        checks.integer("clients_per_round", value, at_least=1)
        if self.num_clients is not None and value > self.num_clients:
            raise InvalidValueError(
                f"clients_per_round={value} must be <= num_clients={self.num_clients} "
                "(write a decimal point for a fraction)"
            )

    def is_bounded(self, *, covered: bool) -> bool:
        """Tell whether each client's charge is known before every release.

        The one answer to that question: such a run has a budget in a ledger and keeps raw
        measurements private.  It claims a bound if, moreover, its noise is secret.

        Parameters
        ----------
        covered
            Whether the noise reaches every tensor that is released; only the mode
            `fixed_dp` depends on it, and it gives up with reproducible noise.
        """
        claim = MODE_TABLE[self.mode].claim
        if claim is Claim.IF_COVERED:
            return covered and self.noise_seed is None
        return claim is Claim.BOUND

    def patterns(self, name: str) -> tuple[str, ...]:
        """Return the comma-separated patterns of `noise_layers`, `trainable` or `whole`."""
        return tuple(
            part.strip() for part in (getattr(self, name) or "").split(",") if part.strip()
        )

    def cohort_limit(self, num_clients: int) -> int:
        """Return the largest cohort as a number of clients, at least one."""
        if isinstance(self.clients_per_round, float):
            return max(1, round(self.clients_per_round * num_clients))
        if self.clients_per_round > num_clients:
            raise InvalidValueError(
                f"clients_per_round={self.clients_per_round} must be <= num_clients={num_clients}"
            )
        return self.clients_per_round

    @property
    def num_releases(self) -> int:
        """How often the model moves: once in a window of `rounds_per_release` rounds."""
        return -(-self.num_rounds // self.rounds_per_release)

    @property
    def late_releases(self) -> tuple[int, int] | None:
        """How many models are averaged at the end, and of how many; None: only one."""
        count = round(self.average_late * self.num_releases)
        return (count, self.num_releases) if count > 1 else None

    @property
    def releases_per_evaluation(self) -> int:
        """After how many releases the model is evaluated: `eval_every` rounds, or one release."""
        return max(1, self.eval_every // self.rounds_per_release)

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dictionary, in declaration order."""
        return dataclasses.asdict(self)


def option_fields(kind: type[RunConfig] = RunConfig) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a configuration by name; `declare` says what their metadata are."""
    return {item.name: item for item in dataclasses.fields(kind)}


def old_names(kind: type[RunConfig] = RunConfig) -> dict[str, str]:
    """Return the options that had another name before: old -> new."""
    fields = option_fields(kind).items()
    return {item.metadata["was"]: name for name, item in fields if item.metadata["was"]}


def option_names(flag: Flag, kind: type[RunConfig] = RunConfig) -> tuple[str, ...]:
    """Return the options that were declared with a flag, in their order."""
    fields = option_fields(kind).items()
    return tuple(name for name, item in fields if flag in item.metadata["flags"])
