"""What benchmarks of papers fix: whole settings of training, so that another default changes no table."""

from collections.abc import Iterable

from lightning_gnnscale.cli.compose import prepare_overrides

_PLAIN = ("norm=null", "input_dropout=0.0", "dropout=0.5")
_ADAM = "model.optimizer={_target_:torch.optim.Adam,_partial_:true,lr:${model.lr},weight_decay:${model.weight_decay}}"


def _model(num_layers: int, hidden_channels: int, *backbone: str) -> tuple[str, ...]:
    of_backbone = (*_PLAIN, f"num_layers={num_layers}", f"hidden_channels={hidden_channels}", *backbone)
    own = ("lr=0.01", "weight_decay=0.0", "loss=ce")
    return (*(f"model.{word}" for word in own), _ADAM, *(f"model.backbone.{word}" for word in of_backbone))


def _skip(bound: str) -> tuple[str, ...]:
    own = ("exchange._target_=lightning_gnnscale.strategy.HaloExchange", "rows=block", "warmup_epochs=0")
    own += ("cooldown_epochs=0", "remote_gradient=straight_through", "skip_gradients=false", "gradient_clip=null")
    return tuple(f"strategy.exchange.{word}" for word in (*own, "stale=hold", f"bound.{bound}"))


_BEST = ("monitor=val_acc", "mode=max", "save_top_k=1")  # the checkpoint that is tested
_BEST = tuple(f"callbacks.checkpoint.{word}" for word in _BEST)

# The settings that come with a choice in a config group.
CHOICES: dict[str, tuple[str, ...]] = {
    "dataset=npz": (
        *("dataset.root=null", "dataset.split=auto", "dataset.fractions=[0.7,0.15,0.15]", "dataset.split_seed=0"),
        *("dataset.normalize=true", "dataset.to_undirected=true", "dataset.remove_self_loops=true"),
        *("dataset.hold_out=null", "dataset.use_features=true"),
    ),
    "partitioner=spring": ("partitioner.tau_vol=null", "partitioner.tau_factor=0.1", "partitioner.beta=1.05"),
    "rows=auto": ("rows.preset=auto",),
    "rows=tiered": (
        "rows.method=rule",
        *(
            "rows.buffer_share=0.1",
            "rows.alpha=0.2",
            "rows.probability=auto",
            "rows.host_rows=null",
        ),
        *("rows.cache_rows=0", "rows.cache_policy=lru", "rows.lookahead_batches=16"),
        *("rows.locality_scale=null", "rows.neighbor_set_size=8192", "rows.gather_threads=1"),
    ),
    "sampler=neighbor": ("sampler.fanouts=[25,10]", "sampler.replace=false"),
    "sampler=full_neighbor": ("sampler.fanouts=[-1,-1]", "sampler.replace=false"),
    "source=threads": ("source.num_threads=1", "source.prefetch_batches=null"),
    "datamodule=partition": (
        *("datamodule.mode=mini_batch", "datamodule.batch_size=512", "datamodule.halo_hops=1", "datamodule.scope=part"),
        *("datamodule.interleave_parts=1", "datamodule.stored_features=true"),
        *("datamodule.stored_edge_features=true", "datamodule.seed=${seed}"),
    ),
    "datamodule=full_graph": ("datamodule.seed=${seed}",),
    "evaluation=layerwise": (  # all validation nodes choose the checkpoint, not a sample of them
        *("evaluation.mode=layerwise", "evaluation.sample=1", "evaluation.table_dtype=float32"),
        *("evaluation.block_edges=1048576", "evaluation.scratch=null", "evaluation.negatives=auto"),
    ),
    "model=gcn": _model(2, 256, "activation=relu"),
    "model=gat": _model(2, 256, "activation=elu", "heads=4", "attention_dropout=null"),
    "model=graphsage": _model(2, 256, "activation=relu"),
    "strategy=gnnscale": ("strategy.start_method=null", "strategy.timeout=1800"),
    "strategy/weights=model_averaging": (
        *("strategy.weights.every_n_epochs=1", "strategy.weights.optimizer_state=per_part"),
        *("strategy.weights.part_major=false", "strategy.weights.control_variates=false"),
    ),
    "strategy/weights=gradient_averaging": ("strategy.weights.local_clip=null",),
    "strategy/weights=bounded_gradient_staleness": ("strategy.weights.max_age=1", "strategy.weights.local_clip=null"),
    "strategy/exchange=halo": ("strategy.exchange.backward=push",),
    "strategy/exchange=skip_epoch_fixed": _skip("max_age=1"),
    "strategy/exchange=skip_epoch_adaptive": _skip("max_age=1"),
    "strategy/exchange=skip_variation_gap": (*_skip("max_gap=0.1"), "strategy.exchange.bound.norm=relative"),
    "strategy/exchange=quantized": (
        *("strategy.exchange.bits=4", "strategy.exchange.delta=true", "strategy.exchange.backward_bits=null"),
        *(
            "strategy.exchange.backward_threshold=0.0",
            "strategy.exchange.backward=auto",
            "strategy.exchange.seed=${seed}",
        ),
        "strategy.exchange.exchange._target_=lightning_gnnscale.strategy.HaloExchange",
    ),
    "trainer=default": (
        *("trainer.accelerator=auto", "trainer.precision=32-true", "trainer.check_val_every_n_epoch=1"),
        *("trainer.gradient_clip_val=null", "trainer.accumulate_grad_batches=1", "trainer.num_sanity_val_steps=0"),
        *("trainer.log_every_n_steps=1", "trainer.enable_model_summary=false", "trainer.max_epochs=100"),
    ),
    "callbacks=default": _BEST,
    "callbacks=early_stopping": (
        *_BEST,
        *("callbacks.early_stopping.monitor=val_acc", "callbacks.early_stopping.mode=max"),
        "callbacks.early_stopping.patience=10",
    ),
}

_ALWAYS = ("dataset=npz", "source=threads", "evaluation=layerwise", "trainer=default", "callbacks=default")
_ALWAYS += ("strategy=gnnscale", "rows=auto", "planner=default", "logger=csv", "test=true", "predict=false")
_ALWAYS += ("elastic=false", "save_steps=100", "changed=false", "keep_layers=false")
_ALWAYS += ("feature_storage=null", "pack_halo=auto", "store=null", "resume=null", "seed=0", "matmul_precision=highest")

# The settings of each paper; a benchmark adds its axes, such as another model of the same paper.
PAPERS: dict[str, tuple[str, ...]] = {
    "sdt_gnn": (  # SPRING; each part a model of its own, averaged by training nodes; Adam at 0.01, 100 epochs
        *(*_ALWAYS, "partitioner=spring", "sampler=neighbor", "datamodule=partition", "model=graphsage"),
        *("strategy/weights=model_averaging", "strategy/exchange=none"),
    ),
    "sancus": (  # the full graph, a block of rows a process; a GCN of 3 layers of 128
        *(*_ALWAYS, "partitioner=random", "sampler=neighbor", "datamodule=full_graph", "model=gcn"),
        *("strategy/weights=gradient_averaging", "strategy/exchange=broadcast", "model.weight_decay=5.0e-4"),
        *("model.backbone.num_layers=3", "model.backbone.hidden_channels=128"),
    ),
    "data_placement": (  # batches cross parts; gradients joined at every step
        *(*_ALWAYS, "partitioner=random", "sampler=neighbor", "datamodule=partition", "datamodule.scope=graph"),
        *("model=graphsage", "model.backbone.num_layers=3", "sampler.fanouts=[15,10,5]", "rows=tiered"),
        *("strategy/weights=gradient_averaging", "strategy/exchange=none"),
    ),
}


def pinned(paper: str, own: Iterable[str]) -> list[str]:
    """Return the overrides of `train` of a benchmark of a paper.

    Args:
        paper: One of PAPERS.
        own: Overrides of the benchmark and of its user. They win over the paper's, and a choice that they make brings
            what CHOICES says of it.
    """
    choices, values = {}, {}
    for word in (*PAPERS[paper], *own):
        key = word.lstrip("+").partition("=")[0]
        (values if "." in key else choices)[key] = word
    brought = {inner.partition("=")[0]: inner for word in choices.values() for inner in CHOICES.get(word, ())}
    return [*choices.values(), *prepare_overrides([*(brought | values).values()])]
