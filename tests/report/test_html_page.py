"""The page as text: what is in it, what cannot get out of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

from fedquilt.common.colors import LIGHT
from fedquilt.report.html_page import PRIVATE_WARNING, embedded, html_page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{script}}&\u2028'\""


def view(name: str = "run", seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a run as `fedquilt.report.views` describes it."""
    claim = {"bounded": True, "headline": "h", "text": name, "epsilon_max": 3.0, "delta": 1e-5}
    claim |= {"finished": True, "figure": "ε ≤ 3", "explained": "what it means", "lifetime": None}
    return {
        "name": name,
        "mode": "certified",
        "method": "full",
        "dataset": "digits",
        "seed": seed,
        "config": [["epsilon", "3.0", True]],
        "rounds": 2,
        "planned": 2,
        "finished": True,
        "joins": [2, 0, 1],
        "roster_is": "joined",
        "per_round": {},
        "evaluation": {
            "metric": "accuracy",
            "rounds": [1, 2],
            "values": [0.1, 0.2],
            "loss": [2.0, 1.0],
        },
        "claim": {**claim, "adjacency": "zero-out"},
        **changes,
    }


def page(*runs: dict[str, Any], **more: Any) -> str:
    return html_page({"fedquilt": "0", "private": False, "runs": list(runs), **more})


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_data_stay_data() -> None:
    text = page(view(EVIL))
    assert data_of(text)["runs"][0]["name"] == EVIL
    assert text.count("<script") == 2
    assert "<img" not in text
    assert "alert(1)" in text  # it is there, and it is text
    titled = html_page({"fedquilt": "0", "runs": [view()]}, title=EVIL)
    assert titled.count("<script") == 2


def test_embedded_json_holds_no_sign_that_could_end_it() -> None:
    text = embedded({"a": EVIL})
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text) == {"a": EVIL}


def test_the_policy_names_the_one_script_and_the_one_style() -> None:
    text = page(view())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    for tag in ("script", "style"):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(inside) == 1
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert "connect-src" not in policy[1]
    assert "connect-src 'self'" in html_page({"fedquilt": "0", "runs": [view()]}, live=True)


def test_nothing_is_fetched_from_anywhere() -> None:
    addresses = set(
        re.findall(r"(?:https?:)?//[\w.-]+\.\w+", re.sub(r"//.*\n", "\n", page(view())))
    )
    assert addresses <= {"http://www.w3.org"}  # the name of SVG, not a place
    assert not re.search(
        r"<(?:link|script|iframe|object)[^>]*(?:src|href)=\"(?!data:)", page(view())
    )


def test_the_claim_is_there_without_scripts() -> None:
    said = re.search(r"<noscript>(.*?)</noscript>", page(view("every client & more")), re.DOTALL)
    assert said is not None
    assert "every client &amp; more" in said[1]


def test_private_is_said_first_and_only_then() -> None:
    assert PRIVATE_WARNING in page(view(), private=True)
    assert PRIVATE_WARNING not in page(view())


def test_seeds_make_a_series() -> None:
    data = data_of(page(view("a"), view("b", 1), view("c", mode="fedavg")))
    assert [(one["label"], one["runs"]) for one in data["series"]] == [
        ("fedavg", [2]),
        ("certified", [0, 1]),
    ]
    assert [run["series"] for run in data["runs"]] == [1, 1, 0]
    assert data["series"][1]["curve"]["mean"] == [0.1, 0.2]


def test_every_tier_has_a_look_of_its_own() -> None:
    widths = {f"1/{n}": [0.1] for n in range(1, 11)}
    shown = data_of(page(view(tiers={"rounds": [1], "widths": widths})))["runs"][0]["tiers"]
    looks = {(one["color"], one["dash"], one["marker"]) for one in shown["looks"]}
    assert len(looks) == 10
    assert len({one["color"] for one in shown["looks"]}) == len(LIGHT)


def figures(*runs: dict[str, Any], **more: Any) -> list[tuple[str, str]]:
    data = data_of(page(*runs, **more))
    return [(one["figure"], one["text"]) for one in data["figures"]]


def test_the_first_screen_has_three_figures() -> None:
    runs = [view(seed=s) for s in (0, 1, 2)]
    runs[2]["evaluation"] = {**runs[2]["evaluation"], "values": [0.1, 0.26]}
    metric, promise, joined = figures(*runs)
    spread = "mean of 3 seeds ±\u00a00.0346 (standard deviation)"
    assert metric == ("0.2200", f"{spread}, after 2 rounds")
    assert promise == ("ε ≤ 3", "at δ = 1e-05. what it means")
    assert joined[0] == "2 of 3"
    assert joined[1].startswith("seed 0: joined at least once"), "it is of the first seed"
    other = view("fedavg", mode="fedavg", claim={**view()["claim"], "epsilon_max": "inf"})
    assert figures(*runs, other)[0][1].startswith("certified: mean of 3 seeds"), "the bounded one"
    assert figures(*runs, other)[2][1].startswith("certified: seed 0: joined at least once")
    assert figures(runs[0])[2][1].startswith("joined at least once")


def test_what_was_not_measured_is_said() -> None:
    nothing = {"metric": "accuracy", "rounds": [], "values": [], "loss": []}
    shown = data_of(page(view(evaluation=nothing)))["figures"][0]
    assert (shown["name"], shown["figure"]) == ("Not measured", "-")
    assert shown["text"] == "no measure on test data, after 2 rounds"


def test_the_figure_of_a_claim_is_never_smaller_than_what_is_known() -> None:
    lifetime = {"epsilon": 4.47, "runs": 2}
    whole = {**view()["claim"], "lifetime": lifetime, "figure": "ε ≤ 4.47"}
    assert figures(view(), view(seed=1, claim=whole))[1][0] == "ε ≤ 4.47"
    together = {
        "epsilon": 14.1,
        "figure": "ε ≤ 14.1",
        "where": "a sweep",
        "headline": "Every client: ε ≤ 14.1",
        "text": "",
        "guess": "",
        "bounded": True,
        "members": [0],
    }
    assert figures(view(), together=[together])[1][0] == "ε ≤ 14.1"


def test_the_claim_beside_a_model_is_not_that_of_other_runs() -> None:
    """Two runs share a ledger, a third one is better and shares nothing with them."""
    better = {"metric": "accuracy", "rounds": [1], "values": [0.99], "loss": [1.0]}
    other = {**view()["claim"], "epsilon_max": 500.0, "figure": "ε ≤ 500"}
    shown = {"figure": "ε ≤ 0.438", "where": "a ledger", "headline": "", "text": "", "guess": ""}
    together = {**shown, "epsilon": 0.438, "bounded": True, "members": [0, 1]}
    small = [view(str(seed), seed, config=[["epsilon", "0.3", False]]) for seed in (0, 1)]
    runs = [*small, view(evaluation=better, claim=other)]
    metric, promise, _ = figures(*runs, together=[together])
    assert (metric[0], promise[0]) == ("0.9900", "ε ≤ 500")
    assert promise[1].endswith("For a ledger together it is ε ≤ 0.438: see below.")
    second = {**together, "epsilon": 9.0, "figure": "ε ≤ 9", "members": [2]}
    runs[0]["evaluation"] = {**better, "values": [0.999]}
    runs[1]["evaluation"] = runs[0]["evaluation"]
    assert figures(*runs, together=[together, second])[1][0] == "ε ≤ 0.438", "the lead's own"


def test_an_unfinished_run_shows_what_it_has_spent() -> None:
    claim = {**view()["claim"], "bounded": False, "finished": False, "epsilon_max": None}
    spend = {"rounds": {"max": [0.5, 1.2341]}}
    run = view(claim=claim, finished=False, planned=9, spend=spend)
    metric, promise, _ = figures(run)
    assert metric[1].endswith("after round 2 of 9")
    assert promise[0] == "ε ≤ 1.24"


def test_the_metric_stands_against_the_epsilon_that_was_asked() -> None:
    runs = [
        view(
            str(epsilon),
            seed,
            config=[["epsilon", str(epsilon), False]],
            claim={**view()["claim"], "epsilon_max": epsilon},
        )
        for epsilon in (6.0, 1.0)
        for seed in (0, 1)
    ]
    (line,) = data_of(page(*runs))["tradeoff"]
    assert (line["name"], line["x"], line["y"]) == ("certified", [1, 6], [0.2, 0.2])
    assert data_of(page(view()))["tradeoff"] == []
    other = view("other", mode="fixed_dp")
    assert data_of(page(*runs, other))["tradeoff"] == [], "a comparison of modes is no sweep"
