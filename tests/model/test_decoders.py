"""Scores of triples against the papers' formulas and PyG's models; one end against many as each pair alone."""

import pytest
import torch
from torch_geometric.nn import kge

import lightning_gnnscale as gs
from lightning_gnnscale.model import ComplEx, DistMult, LinkDecoder, MLPDecoder, NoLayers, TransE
from lightning_gnnscale.model.decoders import DECODERS, make_decoder, pair_scores, scores_against
from tests.says import said
from tests.tiers import all_pairs

RELATIONS, WIDTH = 5, 8
SOURCE, OTHER = torch.randn(2, 20, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
RELATION = torch.arange(20) % RELATIONS


def made(name: str, **options):
    torch.manual_seed(0)
    return make_decoder(name, WIDTH, RELATIONS, **options).double()


def as_complex(values):
    return torch.complex(*values.chunk(2, dim=-1))


def by_the_papers(name: str, head, relation, tail):
    if name == "distmult":
        return torch.einsum("nc,nc,nc->n", head, relation, tail)
    if name == "complex":
        head, relation, tail = (as_complex(values) for values in (head, relation, tail))
        return (head * relation * tail.conj()).sum(dim=1).real
    return 9.0 - (head + relation - tail).abs().sum(dim=1)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("name", ["distmult", "complex", "transe"])
def test_scores_are_those_of_the_papers(name, inverse):
    decoder = made(name, inverse=inverse)
    assert len(decoder.relations) == RELATIONS * (1 + inverse)
    expected = by_the_papers(name, SOURCE, decoder.relations[RELATION], OTHER)
    torch.testing.assert_close(decoder(SOURCE, OTHER, RELATION), expected)
    if inverse:  # heads are the tails of the inverse relation
        expected = by_the_papers(name, OTHER, decoder.relations[RELATION + RELATIONS], SOURCE)
    torch.testing.assert_close(decoder(SOURCE, OTHER, RELATION, reverse=True), expected)


@all_pairs
@pytest.mark.parametrize("name", list(DECODERS))
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_one_end_against_many_is_each_pair_alone(name, reverse, inverse):
    decoder = made(name, **({"inverse": inverse} if name not in ("dot", "mlp") else {}))
    ends, candidates = SOURCE[:7].clone().requires_grad_(), OTHER.clone().requires_grad_()
    sides = (candidates[None], ends[:, None]) if reverse else (ends[:, None], candidates[None])
    expected = pair_scores(decoder, *sides, RELATION[:7, None], reverse)
    found = scores_against(decoder, ends, candidates, RELATION[:7], reverse)
    assert found.shape == (7, 20)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(7, 20, dtype=torch.float64)
    wanted = (ends, candidates, *decoder.parameters())
    for one, two in zip(*(torch.autograd.grad((s * weight).sum(), wanted) for s in (found, expected)), strict=True):
        torch.testing.assert_close(one, two)


def test_a_function_of_the_users_own_is_asked_both_ways():
    def asymmetric(source, other, relation):
        return (source * other.roll(1, dims=-1)).sum(dim=-1) * (relation + 1)

    found = scores_against(asymmetric, SOURCE[:4], OTHER, RELATION[:4], reverse=True)
    torch.testing.assert_close(found[2, 3], asymmetric(OTHER[3], SOURCE[2], RELATION[2]))

    class Plain(LinkDecoder):
        def forward(self, source, other):
            return (source - other).abs().sum(dim=-1)

    assert scores_against(Plain(), SOURCE[:4], OTHER).shape == (4, 20)


@pytest.mark.parametrize(
    ("name", "theirs"), [("distmult", kge.DistMult), ("complex", kge.ComplEx), ("transe", kge.TransE)]
)
def test_scores_equal_pygs(name, theirs):
    width = WIDTH // 2 if name == "complex" else WIDTH
    torch.manual_seed(2)
    model = theirs(20, RELATIONS, width).double()
    nodes, relations = model.node_emb.weight.detach(), model.rel_emb.weight.detach()
    decoder = made(name, **({"margin": 0.0} if name == "transe" else {}))
    if name == "complex":
        nodes = torch.cat([nodes, model.node_emb_im.weight.detach()], dim=1)
        relations = torch.cat([relations, model.rel_emb_im.weight.detach()], dim=1)
    if name == "transe":  # PyG normalises the nodes at every call
        nodes = torch.nn.functional.normalize(nodes, p=1, dim=-1)
    decoder.relations.data.copy_(relations)
    head, tail = torch.arange(20), torch.arange(20).flip(0)
    torch.testing.assert_close(decoder(nodes[head], nodes[tail], RELATION), model(head, RELATION, tail))


def test_the_penalty_is_the_sum_of_cubes():
    decoder = made("distmult")
    expected = sum((v.abs() ** 3).sum() for v in (SOURCE, OTHER, decoder.relations[RELATION])) / 20
    torch.testing.assert_close(decoder.penalty(SOURCE, OTHER, RELATION), expected)
    decoder = made("complex", inverse=True)
    there, back = decoder.relations[RELATION], decoder.relations[RELATION + RELATIONS]
    cubes = [(as_complex(v).abs() ** 3).sum() for v in (SOURCE, OTHER, there, back)]
    expected = (cubes[0] + cubes[1] + (cubes[2] + cubes[3]) / 2) / 20
    torch.testing.assert_close(decoder.penalty(SOURCE, OTHER, RELATION), expected)
    zero = torch.zeros(2, WIDTH, requires_grad=True)
    decoder.float().penalty(zero, zero, RELATION[:2]).backward()
    assert not zero.grad.any()


def test_distances_of_near_ends_keep_their_digits():
    decoder = TransE(64, 1, norm=2, margin=0.0)
    torch.nn.init.zeros_(decoder.relations)
    ends = torch.randn(40, 64)
    near = ends + 1e-3 * torch.randn(40, 64)
    relation = torch.zeros(40, dtype=torch.int64)
    expected = decoder.double()(ends.double(), near.double(), relation)
    found = decoder.float().against(ends, near, relation).diagonal()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cosine", 8, 3), "decoder dot mlp distmult complex transe 'cosine'"),
        (("distmult", 8, None), "decoder relations num_relations="),
        (("complex", 7, 3), "ComplEx even real imaginary 7"),
        (("distmult", 8, 0), "num_relations 1 0"),
    ],
)
def test_bad_decoders(arguments, message):
    with pytest.raises(ValueError, match=said(message)):
        make_decoder(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"decoder": "dot", "decoder_options": {"inverse": True}},
            "dot inverse",
        ),
        ({"decoder": "transe", "num_relations": 2, "decoder_options": {"norm": 3}}, "TransE 1 2"),
        ({"decoder": "distmult", "num_relations": 2, "decoder_options": {"p": 3}}, "must be of inverse, got p"),
        ({"decoder": "dot", "penalty": 0.1}, "penalty 0 decoder relations distmult"),
        ({"decoder": "distmult", "num_relations": 2, "penalty": -1}, "penalty 0 0 -1"),
        ({"loss": "hinge"}, "loss logistic softmax 'hinge'"),
        ({"loss": "softmax", "negative_weight": 1}, "negative_weight=1 loss=logistic"),
        ({"decoder": MLPDecoder(4), "decoder_options": {"channels": 4}}, "decoder_options decoder"),
    ],
)
def test_settings_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=said(message)):
        gs.LinkPredictor(NoLayers(4), **options)


def test_a_checkpoint_makes_the_decoder_and_the_model_again(tmp_path):
    module = gs.LinkPredictor(
        NoLayers(6), decoder="complex", num_relations=3, decoder_options={"inverse": True}, loss="softmax", penalty=0.1
    )
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(checkpoint)
    checkpoint["pytorch-lightning_version"] = "2.5.2"
    torch.save(checkpoint, tmp_path / "m.ckpt")
    again = gs.LinkPredictor.load_from_checkpoint(tmp_path / "m.ckpt")
    assert isinstance(again.decoder, ComplEx)
    assert isinstance(again.backbone, NoLayers)
    assert (again.penalty, again.loss, again.decoder.inverse) == (0.1, "softmax", True)
    torch.testing.assert_close(again.decoder.relations, module.decoder.relations)


def test_distmult_is_the_same_in_both_directions():
    decoder = DistMult(WIDTH, RELATIONS).double()
    torch.testing.assert_close(decoder(SOURCE, OTHER, RELATION), decoder(OTHER, SOURCE, RELATION))
