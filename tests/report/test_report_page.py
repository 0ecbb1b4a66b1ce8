"""The report: what the page says is what the run recorded, read off the page in a browser where there is one."""

import json
import os
import re
import shutil
from itertools import pairwise

import pytest

from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.report import figures
from lightning_gnnscale.report.page import tiers, write_report
from lightning_gnnscale.report.run_record import RunRecord
from lightning_gnnscale.report.side_by_side import labelled, other_split
from lightning_gnnscale.report.suggestions import suggest
from tests.report.recorded_runs import BEGAN, CONFIG, log_of, recorded, summary_of, write_run
from tests.says import said

EXCHANGE = {
    "event": "exchange",
    "bytes": [
        {"layer": 1, "direction": "forward", "bytes": 3 << 20},
        {"layer": 1, "direction": "backward", "bytes": 1 << 20},
    ],
    "rows": [{"layer": 1, "sent": 75, "skipped": 25}],
    "seconds": 0.5,
    "wait_seconds": 0.25,
    "compute_seconds": 1.5,
}


def test_runs_that_split_their_nodes_differently_are_told_apart(tmp_path):
    same = [recorded(tmp_path / name) for name in "ab"]
    assert other_split(same) is None
    other = recorded(tmp_path / "c", config={"dataset": {"fractions": [0.6, 0.2, 0.2]}})
    assert other_split([same[0], other]).startswith(
        "These runs split their nodes differently (dataset.fractions differ)"
    )
    more = [one | {"train": [70, 40]} if one["event"] == "parts" else one for one in log_of()]
    assert "they train on 100, 110" in other_split([same[0], recorded(tmp_path / "d", log=more)])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium that is driven, or a skip that says what is missing."""
    selenium = pytest.importorskip("selenium.webdriver", reason="the extra [dev] is not installed: selenium")
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for switch in (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driven = selenium.Chrome(options=options, service=Service(driver))
    yield driven
    driven.quit()


def opened(browser, path, width=1280, scheme="light"):
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    browser.get(path.resolve().as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready") == "true"
    told = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not told, told
    return browser


def text(browser, selector: str) -> str:
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def cells(browser, selector: str) -> list[list[str]]:
    """The texts of the cells of each row that a selector names."""
    return browser.execute_script(
        """return [...document.querySelectorAll(arguments[0])].map(
             (row) => [...row.cells].map((one) => one.textContent));""",
        selector,
    )


def table(browser, section: str, heading: str) -> dict[str, list[str]]:
    """The rows of the table of a section whose first column has a heading."""
    rows = cells(browser, f"#{section} table tr")
    begin = next(at for at, row in enumerate(rows) if row[0] == heading) + 1
    end = next((at for at in range(begin, len(rows)) if len(rows[at]) != len(rows[begin])), len(rows))
    return {first: rest for first, *rest in rows[begin:end]}


def drawn(browser, about: str) -> list[dict]:
    """The traces that plotly has drawn in a figure, which must have become something on the screen."""
    traces, shapes = browser.execute_script(
        """const one = [...document.querySelectorAll('.figure')].find(
             (one) => one.getAttribute('aria-label').startsWith(arguments[0]));
           return [one.data.map((trace) => ({name: trace.name, x: [...trace.x], y: [...trace.y], z: trace.z})),
                   one.querySelectorAll('.main-svg path').length];""",
        about,
    )
    assert shapes > 0, about
    return traces


def test_the_page_of_a_run_says_what_it_recorded(browser, tmp_path):
    run = write_run(tmp_path / "run", log=log_of(average=0.25, wait=0.1, beside_sample=0.2))
    page = opened(browser, write_report([run]))
    assert text(page, "h1") == "small"
    what = text(page, "#what")
    assert what == (
        "GraphSAGE, 2 layers of 64 on synthetic (1,000 nodes, 2,000 edges) in 2 parts by streaming_multilevel; "
        "2 processes, GradientAveraging, neighbours 10, 5"
    )
    assert text(page, "[data-card=test_acc] .value") == "0.8125"
    assert text(page, "[data-card=test_acc] .below") == "best val_acc 0.7600, epoch 3"
    assert text(page, "[data-card=time] .below") == "training 9.00\u00a0s, an epoch 2.00\u00a0s"
    assert text(page, "[data-card=memory] .value") == "1.00 GiB"
    assert text(page, "[data-card=memory] .below") == "in train, all processes; predicted 512\u00a0MiB"
    assert text(page, "[data-card='edges cut'] .value") == "6.2%"
    assert "datamodule.batch_size=1024" in text(page, ".tip code")
    shares = table(page, "epoch", "share of an epoch")
    assert shares["forward"] == ["65.0%"] * 3
    assert shares["average"] == ["25.0%"] * 3
    assert shares["sample, beside training"] == ["20.0%"] * 3
    assert table(page, "bytes", "an epoch, all processes")["feature rows in batches"] == ["2.00 MiB"]
    assert table(page, "bytes", "by layer, an epoch")["hop 2, read by layer 1"] == ["6,000", "14,000", "1.50 MiB"]
    assert table(page, "stages", "stage")["train"] == ["9.00 s", "1.00 GiB", "512 MiB", ""]
    assert table(page, "memory", "rank")["1"] == ["training", "64.0 MiB", "300 MiB"]
    assert table(page, "run", "machine and versions")["torch"] == ["2.6.0"]
    (accuracy,) = (trace for trace in drawn(page, "Metrics by epoch") if trace["name"] == "val_acc")
    assert accuracy["y"] == [0.5, 0.7, 0.76, 0.76]
    assert accuracy["x"] == [1, 2, 3, 4]  # as the log prints them
    assert {trace["name"] for trace in drawn(page, "What each process did in the last epoch")} == {
        "forward",
        "wait for a batch",
        "sample",
    }
    assert drawn(page, "Sources of the edges into each part")[0]["z"] == [[0.9, 0.1], [0.05, 0.95]]
    assert drawn(page, "Labels of each part")[0]["z"] == [[0.5, 0.5], [0.25, 0.75]]
    assert drawn(page, "Nodes, halos")[0]["y"] == [600, 400]
    assert drawn(page, "Peak by stage")[0]["x"] == [100 / 1024, 1.0]
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0  # no network


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_a_phone_in_light_and_dark(browser, tmp_path, scheme):
    name = "a_name_that_is_as_long_as_names_of_runs_may_become_when_nobody_looks"
    log = [*log_of(average=0.25, wait=0.1), *(EXCHANGE | {"epoch": epoch, "rank": 0} for epoch in range(4))]
    runs = [write_run(tmp_path / name / folder, log=log) for folder in ("one", "two")]
    for page in (write_report(runs[:1]), write_report(runs, tmp_path / "both.html")):
        opened(browser, page, 390, scheme)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        widths = browser.execute_script(
            "return [...document.querySelectorAll('.figure .main-svg')].map((one) => one.clientWidth)"
        )
        assert widths and max(widths) <= 390
        back, ink = browser.execute_script(
            "const of = getComputedStyle(document.body); return [of.backgroundColor, of.color]"
        )
        light = {key: sum(map(int, re.findall(r"\d+", value))) for key, value in (("back", back), ("ink", ink))}
        assert (light["back"] > light["ink"]) == (scheme == "light")
        drawn_ink = browser.execute_script("return getComputedStyle(document.querySelector('.figure text')).fill")
        assert (light["back"] > sum(map(int, re.findall(r"\d+", drawn_ink)))) == (scheme == "light")


def test_several_runs_stand_side_by_side(browser, tmp_path):
    first = write_run(tmp_path / "first", log=log_of(wait=0.5, beside_sample=0.6))
    other = summary_of(log_of()) | {"title": "wider"}
    other["facts"] = other["facts"] | {"test_acc": "0.9375"}
    config = {"model": {**CONFIG["model"], "lr": 0.1}, "name": "wider"}
    second = write_run(tmp_path / "second", config=config, summary=other, log=log_of(average=0.3, exchange=0.2))
    page = opened(browser, write_report([first, second], tmp_path / "both.html"))
    told = {name: columns for name, *columns in cells(page, "#overview tr")}
    assert told[""] == ["small", "wider"]
    assert told["test_acc"] == ["0.8125", "0.9375"]
    assert told["waited for batches and processes"] == ["50.0% and 0.0%", "0.0% and 0.0%"]
    assert table(page, "settings", "setting") == {"model.lr": ["0.01", "0.1"]}
    assert table(page, "epoch", "share of an epoch")["average"] == ["0.0%", "30.0%"]
    assert {trace["name"] for trace in drawn(page, "Metrics by epoch")} == {"small: val_acc", "wider: val_acc"}
    waits = next(t for t in drawn(page, "Seconds of a mean epoch") if t["name"] == "wait for a batch")
    assert (waits["y"], waits["x"]) == (["small", "wider"], [1.0, 0])
    assert len(page.find_elements("css selector", ".tip")) == 2


def test_an_exchange_is_told_by_layer(browser, tmp_path):
    log = [*log_of(exchange=0.25), *(EXCHANGE | {"epoch": e, "rank": r} for e in range(4) for r in range(2))]
    page = opened(browser, write_report([write_run(tmp_path / "run", log=log)]))
    assert "25.0% was spent exchanging, 12.5% waiting" in text(page, "#exchange")
    assert "Of 800 rows to send 25.0% were skipped" in text(page, "#exchange")
    assert cells(page, "#exchange tbody tr") == [
        ["1", "forward", "24.0 MiB", "75.0%"],
        ["1", "backward", "8.00 MiB", "25.0%"],
    ]
    sent = {trace["name"]: trace["y"] for trace in drawn(page, "MiB that all processes sent")}
    assert sent == {"layer 1, forward": [6] * 4, "layer 1, backward": [2] * 4}


def test_a_legend_hides_and_shows_what_it_names(browser, tmp_path):
    page = opened(browser, write_report([write_run(tmp_path / "run", log=log_of(wait=0.5))]))
    visible = "return document.querySelector('.figure').data.filter((one) => one.name === 'forward')[0].visible"
    entry = next(one for one in page.find_elements("css selector", ".legend button") if one.text == "forward")
    page.execute_script("arguments[0].click()", entry)
    assert page.execute_script(visible) is False
    page.execute_script("arguments[0].click()", entry)
    assert page.execute_script(visible) is True


def test_a_trace_of_the_profiler_is_linked(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "metrics" / "fit-0-[step].1.pt.trace.json").write_text("{}")
    page = write_report([run]).read_text()
    assert 'href="metrics/fit-0-%5Bstep%5D.1.pt.trace.json"' in page
    assert 'href="run/metrics/fit-0-%5Bstep%5D.1.pt.trace.json"' in write_report([run], tmp_path / "r.html").read_text()


def test_a_run_of_an_older_release_still_has_a_report(tmp_path):
    """It recorded no epochs, no parts and no machine; what it did record is reported."""
    newer = {"epoch_times", "timeline", "parts"}
    log = [event for event in log_of() if event["event"] not in newer]
    log[0] = {"event": "run", "command": "train"}
    averages = [
        {"event": "average", "purpose": "gradients", "epoch": epoch, "rank": 0, "bytes": 1 << 20, "seconds": 0.1}
        for epoch in range(4)
    ]
    run = recorded(tmp_path / "run", log=[*log, *averages])
    assert run.epoch_seconds == 2.0
    assert tiers(run) == {"sent: averages": 1 << 20}
    page = write_report([run.folder]).read_text()
    for words in (
        "0.8125",
        "The events of this run do not include the activities of an epoch",
        "recorded no versions",
        "6.2%",
    ):
        assert words in page
    assert run.parts["halo"] == [200, 300]


def test_epochs_count_from_one_as_the_log_prints_them(tmp_path):
    losses = (2.0, 1.5, 1.25, float("inf"))
    run = recorded(tmp_path, log=[*log_of(), *(EXCHANGE | {"epoch": e, "rank": 0} for e in range(4))], losses=losses)
    assert run.best() == (3, 0.76)
    assert [epoch for epoch, _ in run.curves["val_acc"]] == sorted(run.epochs) == [1, 2, 3, 4]
    assert figures.timeline(run, "last")["layout"]["xaxis"]["title"]["text"] == "seconds of epoch 4"
    for drawn_bars in (figures.epoch_seconds(run), figures.exchanged_bytes(run), figures.exchange_seconds(run)):
        assert {tuple(trace["x"]) for trace in drawn_bars["data"]} == {(1, 2, 3, 4)}
    assert "not finite from epoch 4 on" in suggest(run).why


def test_a_run_that_partitioned_and_trained_nothing_has_a_report(tmp_path):
    kinds = ("run", "partition", "stage", "parts")
    log = [event for event in log_of() if event["event"] in kinds and event.get("stage") != "train"]
    log[0] = log[0] | {"command": "partition"}
    facts = {"nodes": "1,000", "edges stored": "2,000", "store": "stores/mine"}
    run = write_run(tmp_path / "run", log=log, finished=False)
    (run / "run.json").write_text(json.dumps({"title": "parts", "stages": [], "facts": facts, "partitioning": {}}))
    page = write_report([run]).read_text()
    for words in ("1,000 nodes, 2,000 edges in 2 parts by streaming_multilevel", "gnnscale train store=stores/mine"):
        assert words in page
    for words in ("did not finish", "the activities of an epoch", "0.7600"):
        assert words not in page


def test_a_run_that_did_not_end_is_told_so(tmp_path):
    log = [event | ({"failed": True} if event.get("stage") == "train" else {}) for event in log_of()]
    run = write_run(tmp_path / "run", log=log, finished=False)
    page = write_report([run]).read_text()
    assert "did not finish in the stage train" in page
    assert "the same command again" in page


def test_the_summary_of_an_earlier_run_is_not_taken_for_this_one(tmp_path):
    run = write_run(tmp_path / "run")
    os.utime(run / "summary.json", (BEGAN - 100, BEGAN - 100))
    assert not RunRecord.open(run).is_finished


def test_text_of_the_user_is_text(tmp_path):
    summary = summary_of(log_of()) | {"title": "<script>alert(1)</script>"}
    page = write_report([write_run(tmp_path / "run", summary=summary)]).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


@pytest.mark.parametrize("content", ["", "{", "not json"])
def test_files_that_are_cut_short_leave_a_report(tmp_path, content):
    run = write_run(tmp_path / "run")
    (run / "summary.json").write_text(content)
    (run / "metrics" / "metrics.csv").write_text(content)
    (run / "config.yaml").write_text(content)
    assert "did not finish" in write_report([run]).read_text()


def test_what_is_no_run_is_refused(tmp_path):
    for folder, words in ((tmp_path, "events.jsonl"), (tmp_path / "none", "no such folder")):
        with pytest.raises(GNNScaleError, match=said(words)):
            write_report([folder])
    run = write_run(tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(GNNScaleError, match="cannot be written"):
        write_report([run], tmp_path / "file" / "report.html")


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / number / "run") for number in ("1", "2")]
    runs.append(write_run(tmp_path / "other"))
    page = write_report(runs, tmp_path / "all.html").read_text()
    for label in ("small run (1)", "small run (2)", "small other"):
        assert f">{label}<" in page


LAYERS = {"_target_": "lightning_gnnscale.model.GCN", "hidden_channels": 64, "num_layers": 2}


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ([{}, {"lr": 0.003}], ["lr 0.01", "lr 0.003"]),
        ([{}, {"lr": 0.1}, {"lr": 0.1, "seed": 1}], ["lr 0.01, seed 0", "lr 0.1, seed 0", "lr 0.1, seed 1"]),
        ([{}, {"backbone": LAYERS}], ["backbone GraphSAGE", "backbone GCN"]),
        ([{}, {"root": "a" * 40}], ["root none", f"root …{'a' * 31}"]),
        ([{}, {"lr": 1, "a": 1, "b": 1, "c": 1}], ["lr 0.01", "lr 1"]),  # one of many is enough
        ([{"lr": 1}, {"lr": 1}, {"lr": 2}], ["lr 1 first", "lr 1 second", "lr 2"]),
    ],
)
def test_runs_of_one_name_are_called_by_the_settings_that_differ(tmp_path, changes, labels):
    runs = []
    for folder, change in zip(("first", "second", "third"), changes, strict=False):
        model = CONFIG["model"] | {name: value for name, value in change.items() if name != "seed"}
        config = {"model": model, "seed": change.get("seed", 0)}
        runs.append(recorded(tmp_path / folder, config=config))
    assert [run.label for run in labelled(runs)] == labels


def test_what_the_curves_show_is_told_beside_them(tmp_path):
    run = write_run(tmp_path / "run", accuracies=(0.5, 0.6, 0.7, 0.8), losses=(1.0, 1.2, 1.3, 1.4))
    page = write_report([run]).read_text()
    assert "val_loss rises since epoch 1: 1.0000 there, 1.4000 at the end." in page
    assert "Not finished: val_acc was still rising at the end, by 0.1000 in the last of 4 validations." in page


def test_bytes_of_placed_rows_are_told_by_tier(tmp_path):
    reads = [{"event": "reads", "rank": rank, "local": 400, "peer": 0, "host": 80} for rank in range(2)]
    run = recorded(tmp_path, log=[*log_of(), *reads])
    found = tiers(run)
    assert found["placed rows read: local"] == 2 * 400 * 256 / 4
    assert found["placed rows read: host"] == 2 * 80 * 256 / 4
    assert "placed rows read: peer" not in found


def test_bytes_that_workers_sent_are_the_last_total_of_each_process(tmp_path):
    """Every event of a source has what came so far."""
    told = {"event": "preparation", "bytes_away": 40, "busy_s": 1.0, "node": 0}
    so_far = [told | {"rank": rank, "bytes_received": 100 * epoch} for epoch in (1, 2, 3, 4) for rank in (0, 1)]
    found = tiers(recorded(tmp_path, log=[*log_of(), *so_far]))
    assert found["from workers of Ray"] == 2 * 400 / 4
    assert found["from other machines"] == 40 / 4


def test_seconds_of_the_run_go_from_its_first_event_to_its_last(tmp_path):
    run = recorded(tmp_path)
    assert run.seconds == 2.0 * (len(run.log) - 1)
    assert all(late["time"] > early["time"] for early, late in pairwise(run.log))
