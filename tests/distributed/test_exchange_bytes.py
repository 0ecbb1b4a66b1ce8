"""Every byte that is told was counted: at the process group, in the events, in the log, and by hand."""

import numpy as np
import pytest
from exchange_runs import CountedBytes, fit_and_tell
from full_graph_runs import DIM, NUM_CLASSES, fit, make_model, write_store
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale.strategy import (
    BroadcastExchange,
    EpochAdaptive,
    EpochFixed,
    HaloExchange,
    NoExchange,
    Quantized,
    SkipBroadcast,
    VariationGap,
)

WORLD_SIZE, NUM_EPOCHS = 3, 4
PHASES = ("forward", "backward", "evaluation")
POLICIES = {
    "halo": HaloExchange(),
    "halo, pulled": HaloExchange(backward="pull"),
    "broadcast": BroadcastExchange(),
    "4 bits": Quantized(4),
    "2 bits": Quantized(2, delta=False),
    "8 bits, broadcast": Quantized(8, exchange=BroadcastExchange()),
    "sampled backward": Quantized(4, backward_threshold=1),
    "sampled, pushed": Quantized(4, backward_threshold=1, backward="push"),
    "blocks in turns": SkipBroadcast(EpochAdaptive(1)),
    "rows in turns": SkipBroadcast(EpochAdaptive(1), rows="row"),
    "changed blocks": SkipBroadcast(VariationGap(0.04)),
    "changed rows of 8 bits": SkipBroadcast(VariationGap(0.04), Quantized(8), rows="row"),
    "dropped gradients": SkipBroadcast(EpochFixed(1), remote_gradient="drop"),
    "skipped gradients": SkipBroadcast(EpochFixed(1), BroadcastExchange(), skip_gradients=True),
    "gradients that changed, late": SkipBroadcast(VariationGap(0.04), skip_gradients=True, remote_gradient="late"),
    "late, pulled": SkipBroadcast(EpochFixed(1), HaloExchange("pull"), remote_gradient="late"),
    "clipped": SkipBroadcast(EpochFixed(1), Quantized(8), gradient_clip=0.01, remote_gradient="late"),
    "none": NoExchange(),
}


def train_counted(folder, root):
    results = {}
    for name, policy in POLICIES.items():
        counted = CountedBytes()
        _, metrics, told = fit_and_tell(
            folder, name, root, make_model("gcn"), policy, callbacks=[counted], max_epochs=NUM_EPOCHS,
            limit_val_batches=1.0,
        )  # fmt: skip
        results[name] = counted.epochs, metrics, told
    return results


@pytest.fixture(scope="module")
def counted_runs(tmp_path_factory):
    root = write_store(tmp_path_factory.mktemp("store") / "store")
    return launch(WORLD_SIZE, train_counted, tmp_path_factory.mktemp("bytes"), root, limit_s=200)


@pytest.mark.parametrize("name", list(POLICIES))
def test_bytes_told_are_bytes_handed_over(counted_runs, name):
    for epoch in range(NUM_EPOCHS):
        handed = dict.fromkeys(PHASES, 0)
        for results in counted_runs:
            counted, _, told = results[name]
            mine = {phase: counted[epoch].get(phase, 0) for phase in PHASES}
            in_events = {
                phase: sum(entry["bytes"] for entry in told[epoch]["bytes"] if entry["direction"] == phase)
                for phase in PHASES
            }
            assert told[epoch]["epoch"] == epoch
            assert in_events == mine
            handed = {phase: handed[phase] + mine[phase] for phase in PHASES}
        for results in counted_runs:
            logged = results[name][1][epoch]
            assert {phase: logged[f"exchange_{phase}_bytes"] for phase in PHASES} == handed
            assert logged["exchange_static_bytes"] == 0
    last = counted_runs[0][name][1][-1]
    assert last["exchange_evaluation_bytes"] > 0
    assert (last["exchange_backward_bytes"] > 0) == (name not in ("dropped gradients", "skipped gradients", "none"))
    assert sum(epoch["exchange_forward_bytes"] > 0 for epoch in counted_runs[0][name][1]) == {
        "dropped gradients": NUM_EPOCHS // 2,
        "skipped gradients": NUM_EPOCHS // 2,
        "late, pulled": NUM_EPOCHS // 2,
        "clipped": NUM_EPOCHS // 2,
        "none": 0,
    }.get(name, NUM_EPOCHS)


def train_in_bfloat16(folder, root):
    return {
        (name, precision): fit(folder, root, make_model("gcn"), policy, max_epochs=NUM_EPOCHS, precision=precision)[1]
        for name, policy in POLICIES.items()
        for precision in ("32-true", "bf16-mixed")
    }


@pytest.mark.sweep
def test_rows_of_bfloat16_are_exchanged_under_every_policy(tmp_path):
    root = write_store(tmp_path / "store")
    metrics = launch(WORLD_SIZE, train_in_bfloat16, tmp_path / "run", root, limit_s=200)[0]
    for name in POLICIES:
        plain, half = ([epoch["train_loss"] for epoch in metrics[name, kind]] for kind in ("32-true", "bf16-mixed"))
        assert half == pytest.approx(plain, rel=0.03), name
        sent = [metrics[name, kind][-1] for kind in ("32-true", "bf16-mixed")]
        for direction in ("forward", "backward"):
            whole, less = (epoch[f"exchange_{direction}_bytes"] for epoch in sent)
            if name in ("halo", "broadcast"):
                assert less == whole / 4, "two bytes a value, of the eight of float64"


# By hand. Six nodes in a row, 0 - 1 - 2 - 3 - 4 - 5, two on each of three processes; only node 1 has a label to learn.
# Rows that are read elsewhere: 1 by the process of 2 and 3, 2 by that of 0 and 1, 3 by that of 4 and 5, 4 by that of 2
# and 3: four rows in four messages. The model has three layers of width 16, the last of width 4, in float64; the
# inputs of the second and third are exchanged.
ROW = 16 * 8
HALO = 4 * ROW * 2  # four rows, two layers
BLOCKS = 6 * 2 * ROW * 2  # six rows to two others each, two layers
SIZES = 3 * 2 * 8  # where a receiver cannot know how much comes: each process tells the two others in 8 bytes
# Pulled gradients of outputs: in the last layer that of node 1, of width 4, to one process; in the second those of
# nodes 0, 1 and 2, which node 1's output reads, of which 1 and 2 are sent, to one process each. A message has a
# bitmap of one byte.
PULLED = SIZES + (1 + 4 * 8) + SIZES + 2 * (1 + ROW)
# In 4 bits a row of 16 values is a scale of 2 bytes and 8 bytes; one of 4 values 2 and 2 bytes.
QUANTISED, QUANTISED_PULLED = 4 * (2 + 8) * 2, SIZES + (1 + 2 + 2) + SIZES + 2 * (1 + 2 + 8)
# Pushed gradients of inputs in 4 bits: node 1's output in the last layer reads 2 elsewhere; in the second layer the
# outputs of 0, 1 and 2 have gradients, and 1 reads 2 elsewhere, 2 reads 1.
QUANTISED_PUSHED = SIZES + (1 + 2 + 8) + SIZES + 2 * (1 + 2 + 8)
BY_HAND = {
    "halo": (HaloExchange(), HALO, HALO),
    "pulled": (HaloExchange(backward="pull"), HALO, PULLED),
    "broadcast": (BroadcastExchange(), BLOCKS, BLOCKS),
    "4 bits": (Quantized(4), QUANTISED, QUANTISED_PULLED),
    "4 bits, pushed": (Quantized(4, backward="push"), QUANTISED, QUANTISED_PUSHED),
    # rounded at random, small values may become zero; rows are still sent
    "2 bits": (Quantized(2, delta=False, backward_bits=4), 4 * (2 + 4) * 2, QUANTISED_PULLED),
    # the first epoch is exact and has neither bitmaps nor sizes
    "rows": (SkipBroadcast(EpochFixed(1), rows="row"), HALO, HALO),
}
# Differences need the rows that were sent on both sides, four each a layer; a bound by epochs on the receivers' alone.
HELD = {"4 bits": 8 * 2 * ROW, "4 bits, pushed": 8 * 2 * ROW, "rows": 4 * 2 * ROW}


def write_path(root):
    part_id = np.repeat(np.arange(3), 2).astype(np.int32)
    mask = np.arange(6) == 1
    stream = gs.open_edge_stream(np.array([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]), num_nodes=6, to_undirected=True)
    return gs.write_partition_store(
        root,
        stream,
        gs.Partitioning(part_id, 3, "given", {}, 0),
        features=np.random.default_rng(1).normal(size=(6, DIM)),
        labels=np.arange(6) % NUM_CLASSES,
        masks={"train": mask, "val": ~mask, "test": ~mask},
    ).root


def train_path(folder, root):
    results = {}
    for name, (policy, *_) in BY_HAND.items():
        # elu: no value has a gradient of exactly zero
        model = make_model("gcn", activation="elu")
        results[name] = fit_and_tell(folder, name, root, model, policy, max_epochs=2, limit_val_batches=1.0)[1:]
    return results


def test_bytes_of_a_path_of_six_nodes(tmp_path):
    root = write_path(tmp_path / "store")
    runs = launch(WORLD_SIZE, train_path, tmp_path / "run", root)
    for name, (_, forward, backward) in BY_HAND.items():
        first, second = runs[0][name][0]
        assert first["exchange_forward_bytes"] == forward, name
        assert first["exchange_backward_bytes"] == backward, name
        # validation stands in the account of the next epoch, and reads exactly what exact training reads
        whole = BLOCKS if name == "broadcast" else HALO
        assert first["exchange_evaluation_bytes"] == 0 and second["exchange_evaluation_bytes"] == whole, name
        assert first["rows_sent"] == (12 if name == "broadcast" else 8), name
        assert first["exchange_layer1_forward_bytes"] + first["exchange_layer2_forward_bytes"] == forward, name
        assert first["exchange_layer1_backward_bytes"] + first["exchange_layer2_backward_bytes"] == backward, name
        assert first["exchange_cache_bytes"] == HELD.get(name, 0), name
    # gradients of the last layer's outputs are narrow
    assert runs[0]["pulled"][0][0]["exchange_layer2_backward_bytes"] == SIZES + (1 + 4 * 8)
    # When no row is due, only sizes are reported, in both layers.
    first, second = runs[0]["rows"][0]
    assert second["exchange_forward_bytes"] == 2 * SIZES
    assert second["rows_skipped"] == 8
    # each process has two layers to send, and sends both or none
    for rank in range(WORLD_SIZE):
        done, skipped = f"broadcasts_done_rank{rank}", f"broadcasts_skipped_rank{rank}"
        assert (first[done], first[skipped], second[done], second[skipped]) == (2, 0, 0, 2)
        both = [event["broadcasts"] for event in runs[rank]["rows"][1]]
        assert both == [
            [{"layer": layer, "done": 1, "skipped": 0} for layer in (1, 2)],
            [{"layer": layer, "done": 0, "skipped": 1} for layer in (1, 2)],
        ]
    assert "broadcasts_done_rank0" not in runs[0]["halo"][0][0]


def train_static(folder, roots):
    results = {}
    for name, root in roots.items():
        counted = CountedBytes()
        model = make_model("sgc")
        _, metrics, told = fit_and_tell(folder, name, root, model, HaloExchange(), callbacks=[counted], max_epochs=3)
        results[name] = counted.epochs, metrics, told
    return results


@pytest.mark.sweep
def test_a_constant_input_is_exchanged_once(tmp_path):
    roots = {kind: write_store(tmp_path / kind, sparse=kind == "sparse") for kind in ("dense", "sparse")}
    runs = launch(WORLD_SIZE, train_static, tmp_path / "run", roots)
    counted, metrics, _ = runs[0]["dense"]
    total = sum(results["dense"][0][0]["forward"] for results in runs)
    assert [epoch["exchange_static_bytes"] for epoch in metrics] == [total, 0, 0] and total > 0
    assert counted[1:] == [{}, {}]
    assert all(epoch["exchange_forward_bytes"] == epoch["exchange_backward_bytes"] == 0 for epoch in metrics)
    # Sparse features are mapped first, so that what is propagated changes.
    assert all(epoch["exchange_forward_bytes"] > 0 for epoch in runs[0]["sparse"][1])
