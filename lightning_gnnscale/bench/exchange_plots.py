"""The plot of the exchange benchmark: points lost against bytes sent."""

from pathlib import Path

_MARKERS = "osD^vP*X<>ph"


def plot_exchange(path: Path, rows: list[dict]) -> bool:
    """Plot late points lost against the exact halo over the share of CAGNET's bytes; one panel per case.

    Args:
        path: Path of the PNG.
        rows: Rows of `exchange.csv`; those without an exact halo to compare with are left out.

    Returns:
        Whether there was anything to draw.
    """
    rows = [row for row in rows if row["late_acc_lost"] != ""]
    cases = list(dict.fromkeys((row["graph"], row["partitioner"], row["world_size"]) for row in rows))
    if not cases:
        return False
    from matplotlib.figure import Figure

    columns = min(3, len(cases))
    lines = -(-len(cases) // columns)
    figure = Figure(figsize=(5.5 * columns, 4 * lines + 1), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for axes, case in zip(panels, cases, strict=False):
        for row in rows:
            if (row["graph"], row["partitioner"], row["world_size"]) != case:
                continue
            index = policies.index(row["policy"])
            axes.plot(
                max(row["share_of_cagnet"], 0.1),
                row["late_acc_lost"],
                _MARKERS[index % len(_MARKERS)],
                color=f"C{index % 10}",
                label=row["policy"],
            )
        graph, method, size = case
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set(
            xscale="log",
            xlabel="bytes, % of CAGNET (no exchange: at the left edge)",
            ylabel="late accuracy lost, points",
            title=f"{graph}, {method} parts, {size} processes",
        )
    for axes in panels[len(cases) :]:
        axes.set_visible(False)
    handles = {handle.get_label(): handle for axes in panels for handle in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3 * columns, fontsize="small")
    figure.savefig(path, dpi=120)
    return True
