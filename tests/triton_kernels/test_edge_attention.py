"""Attention over edges: the CPU's steps and Triton's kernels against plain torch, with gradients and hubs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_python import run_python
from torch_geometric.nn import GATConv

from lightning_gnnscale.model.block import make_block, with_self_loops
from lightning_gnnscale.triton_kernels.aggregate import cpu as threads
from lightning_gnnscale.triton_kernels.edge_attention import device, edge_attention, group_by_source, reference
from tests.says import said
from tests.tiers import all_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter takes CPU tensors
# Weighted means of terms of order 1, and gradients of sums of up to 40 of them; halves are rounded once at the end.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SLOPE = 0.2


def some_edges(rows, num_src, seed=0, index_dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    indptr = torch.tensor([0, *rows]).cumsum(0)
    indices = torch.randint(num_src, (sum(rows),), generator=generator)
    indices[: sum(rows) // 2] = 0  # a source of many edges
    return indptr, indices.to(index_dtype), generator


def arguments(indptr, indices, num_src, heads, channels, generator, dtype=torch.float64, terms=("dst", "edge", "keep")):
    """Values and scores that need gradients; the bias has an edge of share 0."""

    def values(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    num_dst, num_edges = len(indptr) - 1, len(indices)
    made = {
        "values": values(num_src, heads, channels), "src_score": values(num_src, heads),
        "dst_score": values(num_dst, heads), "edge_score": values(num_edges, heads), "edge_bias": values(num_edges),
        "keep": (values(num_edges, heads) > 0).double() * 2,
    }  # fmt: skip
    made["edge_bias"][: num_edges // 5] = -torch.inf
    left = {"dst_score": "dst", "edge_score": "edge", "edge_bias": "bias", "keep": "keep"}
    out = {}
    for name, value in made.items():
        value = value.to(dtype).to(DEVICE)
        out[name] = None if name in left and left[name] not in terms else value.requires_grad_(name != "keep")
    return out


ORDER = ("values", "src_score", "dst_score", "edge_score", "edge_bias", "keep")


def plain(given, indptr, indices):
    wide = {
        name: None if part is None else part.detach().double().requires_grad_(name != "keep")
        for name, part in given.items()
    }
    first, second = (wide[name] for name in ORDER[:2]), (wide[name] for name in ORDER[3:])
    out = reference.edge_attention(*first, wide["dst_score"], indptr, indices, *second, SLOPE)
    return out, wide


def kernels(given, indptr, indices, grouped=None):
    return device.EdgeAttention.apply(*(given[name] for name in ORDER), indptr, indices, SLOPE, grouped)


def compiled(given, indptr, indices, grouped=None):
    first, second = (given[name] for name in ORDER[:3]), {name: given[name] for name in ORDER[3:5]}
    drop = None if given["keep"] is None else lambda share: share * given["keep"]
    return edge_attention(*first, indptr, indices, **second, drop=drop, negative_slope=SLOPE, by_source=grouped)


def same(form, given, indptr, indices, dtype=torch.float64):
    """Compare output and every gradient with plain torch in float64; return the output."""
    out = form(given, indptr, indices)
    expected, wide = plain(given, indptr, indices)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(out.device)
    out.backward(grad.to(dtype))
    expected.backward(grad.to(dtype).double())
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)
    for name, part in wide.items():
        if part is not None and part.requires_grad:
            assert given[name].grad.dtype == dtype
            torch.testing.assert_close(given[name].grad.double(), part.grad, rtol=4 * limit, atol=8 * limit, msg=name)
    return out.detach()


FORMS = [pytest.param(compiled, id="cpu"), pytest.param(kernels, id="triton")]


@all_pairs
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "channels"), [(1, 1), (1, 63), (3, 5), (2, 33), (4, 16)])
@pytest.mark.parametrize("terms", [(), ("dst",), ("dst", "edge", "bias"), ("edge", "keep"), ("dst", "bias", "keep")])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_output_and_gradients_equal_plain_torch(form, heads, channels, terms, index_dtype):
    if form is kernels:
        pytest.importorskip("triton")
    indptr, indices, generator = some_edges([3, 0, 17, 1, 70, 0], 9, channels, index_dtype)
    given = arguments(indptr, indices, 9, heads, channels, generator, terms=terms)
    where = DEVICE if form is kernels else "cpu"
    given = {name: part if part is None else part.detach().to(where).requires_grad_(part.requires_grad)
             for name, part in given.items()}  # fmt: skip
    same(form, given, indptr.to(where), indices.to(where))


@pytest.mark.parametrize("dtype", list(device.DTYPES))
def test_halves_are_summed_in_float32(dtype):
    pytest.importorskip("triton")
    indptr, indices, generator = some_edges([3, 0, 17, 20], 9)
    given = arguments(indptr, indices, 9, 2, 33, generator, dtype, ("dst", "edge"))
    same(kernels, given, indptr.to(DEVICE), indices.to(DEVICE), dtype)


@pytest.mark.parametrize("rows", [[9], [3, 20, 3], [0, 8, 0, 17, 9, 0], [40, 40], [4, 4, 4, 5, 1]])
def test_edges_of_hubs_are_shared_out(monkeypatch, rows):
    """Rows and sources of more edges than one program takes, into memory that holds NaN; twice the same bits."""
    pytest.importorskip("triton")
    monkeypatch.setattr(device, "LIMIT", 8)
    monkeypatch.setattr("lightning_gnnscale.triton_kernels.aggregate.device.LIMIT", 8)
    indptr, indices, generator = some_edges(rows, 6, len(rows))
    given = arguments(indptr, indices, 6, 2, 19, generator, terms=("dst", "edge", "bias", "keep"))
    indptr, indices = indptr.to(DEVICE), indices.to(DEVICE)

    def filled(function):
        return lambda *shape, **options: function(*shape, **options).fill_(torch.nan)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))
    out = same(kernels, given, indptr, indices)
    monkeypatch.undo()
    monkeypatch.setattr(device, "LIMIT", 8)
    assert torch.equal(out, kernels(given, indptr, indices).detach())


@settings(max_examples=settings.default.max_examples // 8)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
def test_gradients_against_finite_differences(rows, num_src, heads, seed):
    indptr, indices, generator = some_edges(rows, num_src, seed)
    given = arguments(indptr, indices, num_src, heads, 3, generator, terms=("dst", "edge", "bias", "keep"))
    given = {name: part.detach().cpu() for name, part in given.items()}
    given["edge_bias"] = given["edge_bias"].nan_to_num(neginf=0.5)
    inputs = tuple(given[name].requires_grad_() for name in ORDER[:5])
    assert torch.autograd.gradcheck(
        lambda *parts: edge_attention(*parts[:3], indptr, indices, *parts[3:], lambda share: share * given["keep"]),
        inputs,
    )


@pytest.mark.parametrize("form", FORMS)
def test_large_scores_and_rows_of_shares_0(form):
    """Scores of 1,000 overflow no power; a row whose edges are all at -inf gives 0 and takes no gradient."""
    if form is kernels:
        pytest.importorskip("triton")
    where = DEVICE if form is kernels else "cpu"
    indptr, indices = torch.tensor([0, 2, 4, 4], device=where), torch.tensor([0, 1, 0, 1], device=where)
    given = dict.fromkeys(ORDER)
    given["values"] = torch.tensor([[[1.0]], [[3.0]]], device=where).requires_grad_()
    given["src_score"] = torch.tensor([[1000.0], [1000.0]], device=where).requires_grad_()
    given["edge_bias"] = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf], device=where)
    out = form(given, indptr, indices)
    assert out.flatten().tolist() == [2.0, 0.0, 0.0]
    out.sum().backward()
    assert given["values"].grad.flatten().tolist() == [0.5, 0.5]
    assert given["src_score"].grad.flatten().tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("form", FORMS)
def test_a_score_of_0_has_the_slope_below_0(form):
    """As in torch's leaky ReLU; nodes without features have such scores."""
    if form is kernels:
        pytest.importorskip("triton")
    where = DEVICE if form is kernels else "cpu"
    indptr, indices = torch.tensor([0, 3], device=where), torch.tensor([0, 1, 2], device=where)
    given = dict.fromkeys(ORDER)
    given["values"] = torch.tensor([[[1.0]], [[3.0]], [[4.0]]], dtype=torch.float64, device=where).requires_grad_()
    given["src_score"] = torch.tensor([[0.0], [0.0], [1.0]], dtype=torch.float64, device=where).requires_grad_()
    same(form, given, indptr, indices)


def test_the_number_of_threads_and_kept_groups_change_no_bit(monkeypatch):
    monkeypatch.setattr(threads, "MIN_WORK", 16)
    indptr, indices, generator = some_edges([5, 0, 40, 3] * 30, 50)
    grouped, results = group_by_source(indptr, indices, 50), []
    assert all(torch.equal(*pair) for pair in zip(grouped, reference.group_by_source(indptr, indices, 50), strict=True))
    for num_threads, kept in ((1, None), (3, None), (2, grouped)):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        generator.manual_seed(1)
        given = arguments(indptr, indices, 50, 2, 7, generator, torch.float32)
        given = {name: part if part is None else part.detach().cpu() for name, part in given.items()}
        inputs = [given[name].requires_grad_() for name in ORDER[:4]]
        out = compiled(given, indptr, indices, kept)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), inputs)])
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], result, strict=True))


def test_groups_of_more_sources_than_there_are_values_serve():
    """A layer that computes fewer nodes than its block has sources."""
    indptr, indices, generator = some_edges([5, 0, 40, 3], 7)
    given = arguments(indptr, indices, 7, 2, 3, generator)
    given = {name: part if part is None else part.detach().cpu() for name, part in given.items()}
    grads = []
    for count in (7, 300):
        inputs = [given[name].requires_grad_() for name in ORDER[:3]]
        out = compiled(given, indptr, indices, group_by_source(indptr, indices, count))
        grads.append(torch.autograd.grad(out.square().sum(), inputs))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_backward_may_come_twice():
    pytest.importorskip("triton")
    indptr, indices, generator = some_edges([3, 5], 4)
    given = arguments(indptr, indices, 4, 2, 3, generator)
    out = kernels(given, indptr.to(DEVICE), indices.to(DEVICE))
    first = torch.autograd.grad(out.sum(), given["src_score"], retain_graph=True)[0]
    torch.autograd.grad((2 * out).sum(), given["src_score"], retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(out.sum(), given["src_score"])[0])


def test_equals_the_attention_of_pyg():
    """Output and gradients of PyG's GATConv, with its self-loops, from its own parameters."""
    torch.manual_seed(0)
    conv = GATConv(6, 5, heads=3).double()
    x = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    edge_index = torch.randint(20, (2, 90))
    expected = conv(x, edge_index)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, conv.lin.weight, conv.att_src, conv.att_dst], grad)
    block = with_self_loops(make_block(edge_index, 20, None))
    values = (x @ conv.lin.weight.t()).view(20, 3, 5)
    scores = [(values * vector).sum(-1) for vector in (conv.att_src, conv.att_dst)]
    out = edge_attention(values, *scores, block.indptr, block.indices).flatten(1) + conv.bias
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    found = torch.autograd.grad(out, [x, conv.lin.weight, conv.att_src, conv.att_dst], grad)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(5, 2)}, "values 3-D (5, 2)"),
        ({"src_score": torch.zeros(5, 3)}, "src_score (5, 2) (5, 3)"),
        ({"dst_score": torch.zeros(5, 2)}, "dst_score (2, 2) (5, 2)"),
        ({"edge_score": torch.zeros(2)}, "edge_score (2, 2) (2,)"),
        ({"edge_bias": torch.zeros(3)}, "edge_bias (2,) (3,)"),
        ({"indices": torch.tensor([0, 5])}, "indices [0, 5) 0 5"),
        ({"by_source": group_by_source(torch.tensor([0, 1]), torch.tensor([0]), 5)}, "by_source 5 2 (5, 1)"),
        ({"by_source": group_by_source(torch.tensor([0, 1, 2]), torch.tensor([0, 3]), 4)}, "by_source 5 2 (4, 2)"),
    ],
)
def test_refuses(change, message):
    right = {"values": torch.zeros(5, 2, 3), "src_score": torch.zeros(5, 2), "dst_score": torch.zeros(2, 2),
             "indptr": torch.tensor([0, 1, 2]), "indices": torch.tensor([0, 4])}  # fmt: skip
    with pytest.raises(ValueError, match=said(message)):
        edge_attention(**{**right, **change})


COMPILE = """
from tests.triton_kernels.hopper import compiled
from lightning_gnnscale.triton_kernels.edge_attention import kernel

for values, index, terms, channels in (("fp32", "i64", True, 32), ("bf16", "i32", False, 16), ("fp64", "i64", True, 64),
                                       ("fp16", "i64", True, 300)):
    sums = "fp64" if values == "fp64" else "fp32"
    block = max(16, 1 << (channels - 1).bit_length())
    pointers = dict.fromkeys(("x_ptr", "grad_ptr", "out_ptr", "x_grad_ptr"), "*" + values)
    pointers |= dict.fromkeys(("src_ptr", "dst_ptr", "edge_ptr", "bias_ptr", "keep_ptr", "sums_ptr", "tops_ptr",
                               "row_ptr", "score_grad_ptr", "bias_grad_ptr", "src_grad_ptr"), "*" + sums)
    pointers |= dict(indptr_ptr="*i64", offsets_ptr="*i64", indices_ptr="*" + index, rows_ptr="*" + index,
                     edges_ptr="*i64")
    sizes = dict.fromkeys(("num_rows", "num_src", "num_edges", "heads", "channels"), "i32")
    constants = dict(SLOPE=0.2, HAS_DST=True, HAS_EDGE=terms, HAS_BIAS=terms, HAS_KEEP=terms, BIAS_GRAD=terms,
                     LIMIT=1024, EDGES=max(1, 1024 // block), BLOCK=block)
    for one in (kernel.attend_hubs_kernel, kernel.attend_kernel, kernel.attend_back_hubs_kernel,
                kernel.attend_back_kernel):
        found = compiled(one, options=dict(enable_fp_fusion=True), **pointers, **sizes, **constants)
        assert not found.atomics and found.spilled in (0, None), (one, values, found)
"""


@pytest.mark.sweep
def test_the_kernels_compile_for_hopper_without_atomics_and_spills(tmp_path):
    pytest.importorskip("triton")
    run_python(COMPILE, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cuda_equals_plain_torch_and_itself(dtype):
    indptr, indices, generator = some_edges([40] * 30 + [0, 3000], 500, 1, torch.int32)
    results = []
    for _ in range(2):
        generator.manual_seed(2)
        given = arguments(indptr, indices, 500, 4, 33, generator, dtype)
        out = compiled(given, indptr.cuda(), indices.cuda())
        out.sum().backward()
        results.append([out.detach(), *(given[name].grad for name in ORDER[:4])])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    expected, _ = plain(given, indptr.cuda(), indices.cuda())
    torch.testing.assert_close(results[0][0].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
