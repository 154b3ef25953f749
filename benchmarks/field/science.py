"""Libraries for science: operators, graphs, Gaussian processes, flows, equivariance, control, molecules, tables."""

# Rows of tables, and names of libraries imported when they are called:
# fmt: off

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from field.pattern import (
    Net,
    Run,
    Step,
    adamw,
    add,
    classed,
    classify,
    data,
    dictionary,
    images,
    mlp,
    noise,
    of,
    pattern,
    regress,
    row,
)

row("fno", "neuraloperator", (4, 16), "neuralop.models:FNO", lambda fno: fno((8, 8), 1, 1, hidden_channels=16,
    n_layers=2), lambda: noise((1, 32, 32), (1, 32, 32)), regress)

# Graphs --------------------------------------------------------------------------------------------------------------


def repeated(samples: list[Any]) -> Callable[[int, int], Any]:
    from torch_geometric.loader import DataLoader

    return lambda batch_size, batches: DataLoader(samples * (1 + batch_size * batches // 64), batch_size=batch_size)


def molecules(with_edges: bool = True) -> Callable[[int, int], Any]:
    """Graphs of different sizes, with PyTorch Geometric's own loader."""
    counts = torch.randint(10, 31 if with_edges else 30, (64,)).tolist()
    counts[0] = 30

    def sample(i: int, n: int) -> Any:
        x, edges = torch.randn(n, 16), torch.randint(n, (2, 3 * n))
        more = {"edge_attr": torch.randn(3 * n, 8), "pos": torch.randn(n, 3)} if with_edges else {}
        return of("torch_geometric.data:Data")(x=x, edge_index=edges, y=torch.tensor([i % 4]), **more)

    return repeated([sample(i, n) for i, n in enumerate(counts)])


def graph_classes(network: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(network(batch), batch.y)


GRAPHS = ("torch-geometric", (8, 32), "torch_geometric.nn", molecules, graph_classes)
row("graph_convolutions", "torch-geometric", (8, 32), "torch_geometric.nn", lambda g: Net(
    lambda m, b: m.head(g.global_mean_pool(m.net(b.x, b.edge_index), b.batch)), net=g.GCN(16, 64, 3),
    head=nn.Linear(64, 4)), lambda: molecules(with_edges=False), graph_classes)


@pattern(*GRAPHS)
def graph_gps(g: Any) -> Net:
    """Message passing, and attention of each graph's nodes, padded to the largest graph."""

    def compute(m: Net, b: Any) -> Tensor:
        x, e = m.start(b.x), m.edge(b.edge_attr)
        for layer in m.layers:
            x = layer(x, b.edge_index, b.batch, edge_attr=e)
        return m.head(g.global_mean_pool(x, b.batch))

    layers = nn.ModuleList(g.GPSConv(64, g.GINEConv(mlp(64, 64, 64, 1)), heads=4) for _ in range(2))
    return Net(compute, start=nn.Linear(16, 64), edge=nn.Linear(8, 64), layers=layers, head=nn.Linear(64, 4))


@pattern(*GRAPHS)
def graph_diff_pool(g: Any) -> Net:
    """Dense graphs, padded to the largest; clusters are learned."""

    def compute(m: Net, b: Any) -> Tensor:
        x, mask = of("torch_geometric.utils:to_dense_batch")(b.x, b.batch)
        adjacency = of("torch_geometric.utils:to_dense_adj")(b.edge_index, b.batch)
        x, adjacency, *_ = g.dense_diff_pool(m.embed(x, adjacency, mask).relu(), adjacency,
            m.pool(x, adjacency, mask), mask)
        return m.head(m.last(x, adjacency).mean(1))

    return Net(compute, embed=g.DenseSAGEConv(16, 64), pool=g.DenseSAGEConv(16, 8), last=g.DenseSAGEConv(64, 64),
        head=nn.Linear(64, 4))


@pattern(*GRAPHS)
def graph_top_k_pool(g: Any) -> Net:
    def compute(m: Net, b: Any) -> Tensor:
        x = m.first(b.x, b.edge_index).relu()
        x, edges, _, batch, *_ = m.pool(x, b.edge_index, None, b.batch)
        return m.head(g.global_mean_pool(m.second(x, edges).relu(), batch))

    return Net(compute, first=g.GATv2Conv(16, 64), pool=g.TopKPooling(64, 0.5), second=g.GraphConv(64, 64),
        head=nn.Linear(64, 4))


@pattern(*GRAPHS)
def graph_transformer_conv(g: Any) -> Net:
    def compute(m: Net, b: Any) -> Tensor:
        x = m.first(b.x, b.edge_index, b.edge_attr).relu()
        return m.head(m.read(m.second(x, b.edge_index, b.edge_attr), b.batch))

    first, second = g.TransformerConv(16, 16, heads=4, edge_dim=8), g.TransformerConv(64, 64, edge_dim=8)
    return Net(compute, first=first, second=second, read=g.SoftmaxAggregation(learn=True), head=nn.Linear(64, 4))


def two_types() -> Callable[[int, int], Any]:
    """Graphs of two types of nodes and two of edges."""
    def sample(i: int) -> Any:
        graph, (a, b) = of("torch_geometric.data:HeteroData")(), torch.randint(8, 21, (2,)).tolist()
        graph["user"].x, graph["item"].x, graph.y = torch.randn(a, 16), torch.randn(b, 16), torch.tensor([i % 4])
        for one, two, n, m in (("user", "item", a, b), ("item", "user", b, a)):
            graph[one, "to", two].edge_index = torch.stack([torch.randint(n, (40,)), torch.randint(m, (40,))])
        return graph

    return repeated([sample(i) for i in range(64)])


@pattern("torch-geometric", (8, 32), "torch_geometric.nn", two_types, graph_classes)
def graph_hgt(g: Any) -> Net:
    kinds = (["user", "item"], [("user", "to", "item"), ("item", "to", "user")])

    def compute(m: Net, batch: Any) -> Tensor:
        x = batch.x_dict
        for layer in m.layers:
            x = layer(x, batch.edge_index_dict)
        return m.head(g.global_mean_pool(x["user"], batch["user"].batch))

    layers = nn.ModuleList(g.HGTConv(size, 64, kinds, heads=4) for size in (16, 64))
    return Net(compute, layers=layers, head=nn.Linear(64, 4))


def placed(network: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(network(batch[0], batch[1]), batch[2])


@pattern("egnn-pytorch", (4, 16), "egnn_pytorch:EGNN", lambda: noise((24, 32), (24, 3), (1,)), placed)
def egnn(layer: Any) -> Net:
    """Each sample is a cloud of points, all pairs of which are edges."""
    def compute(m: Net, x: Tensor, positions: Tensor) -> Tensor:
        for each in m.layers:
            x, positions = each(x, positions)
        return m.head(x.mean(1))

    layers = nn.ModuleList(layer(dim=32, num_nearest_neighbors=8) for _ in range(2))
    return Net(compute, layers=layers, head=nn.Linear(32, 1))


@pattern("e3nn", (16, 64), "e3nn.o3", lambda: noise((32,), (3,), (1,)), placed)
def e3nn_tensor_product(o3: Any) -> Net:
    spherical = o3.Irreps("1x0e + 1x1o + 1x2e")

    def compute(m: Net, x: Tensor, position: Tensor) -> Tensor:
        return m.head(m.product(x, o3.spherical_harmonics(spherical, position, True)))

    product = o3.FullyConnectedTensorProduct("8x0e + 8x1o", spherical, "8x0e + 8x1o")
    return Net(compute, product=product, head=o3.Linear("8x0e + 8x1o", "1x0e"))


def chemprop() -> Run:
    """Messages along the bonds of molecules, read from SMILES."""
    chem, parts = of("chemprop.data"), of("chemprop.nn")
    smiles = ["C" * (1 + i % 7) + ("c1ccccc1", "O", "N(C)C", "C(=O)O")[i % 4] for i in range(64)]
    smiles[0] = "CCCCCCCc1ccccc1"
    points = [chem.MoleculeDatapoint.from_smi(s, np.array([float(len(s))])) for s in smiles]

    def loader(batch_size: int, batches: int) -> Any:
        dataset = chem.MoleculeDataset(points * (1 + batch_size * batches // 64))
        return chem.build_dataloader(dataset, batch_size=batch_size, shuffle=False)

    return Run(lambda: of("chemprop.models:MPNN")(parts.BondMessagePassing(d_h=64), parts.MeanAggregation(),
        parts.RegressionFFN(input_dim=64)), loader)


def schnetpack(representation: str) -> Run:
    """Energies, and forces as their slopes: the backward pass is differentiated."""
    of("torch.utils.data.dataloader").T_co = Any  # its release imports this name, which torch 2.13 does not have
    spk, keys = of("schnetpack"), of("schnetpack.properties")
    counts = torch.randint(6, 13, (64,)).tolist()
    counts[0] = 12

    def sample(i: int) -> Any:
        n = counts[i]
        pairs = torch.cartesian_prod(torch.arange(n), torch.arange(n))
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        atoms = {keys.Z: torch.randint(1, 9, (n,)), keys.R: torch.randn(n, 3) * 2, keys.n_atoms: torch.tensor([n])}
        atoms |= {keys.idx_i: pairs[:, 0], keys.idx_j: pairs[:, 1], keys.offsets: torch.zeros(len(pairs), 3)}
        return {**atoms, "energy": torch.randn(1), "forces": torch.randn(n, 3)}

    def build() -> Any:
        settings = {"n_atom_basis": 32, "n_interactions": 2, "radial_basis": spk.nn.GaussianRBF(20, 5.0),
            "cutoff_fn": spk.nn.CosineCutoff(5.0)}
        heads = [spk.atomistic.Atomwise(n_in=32, output_key="energy"), spk.atomistic.Forces()]
        potential = spk.model.NeuralNetworkPotential(of(f"schnetpack.representation:{representation}")(**settings),
            [spk.atomistic.PairwiseDistances()], heads)
        outputs = [spk.task.ModelOutput(name, nn.MSELoss(), weight, metrics={}) for name, weight in (("energy", 0.01),
            ("forces", 0.99))]
        task = spk.task.AtomisticTask(potential, outputs, torch.optim.AdamW, {"lr": 1e-3})
        task.model.initialize_transforms = lambda datamodule: None
        return task

    return Run(build, data(sample, of("schnetpack.data.loader:_atoms_collate_fn")))


add("chemprop_mpnn", "chemprop", (16, 64), chemprop)
add("schnetpack_painn", "schnetpack", (4, 16), lambda: schnetpack("PaiNN"))
add("schnetpack_schnet", "schnetpack", (4, 16), lambda: schnetpack("SchNet"))

# Gaussian processes and probabilistic programs -----------------------------------------------------------------------


@pattern("gpytorch", (64, 256), "gpytorch", lambda: noise((4,), ()))
def gpytorch_svgp(gpytorch: Any) -> Step:
    class Gp(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points = torch.randn(64, 4)
            posterior = gpytorch.variational.CholeskyVariationalDistribution(64)
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, posterior,
                learn_inducing_locations=True))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    step = Step(Gp(), lambda n, b: -step.bound(n(b[0]), b[1]))
    step.likelihood = gpytorch.likelihoods.GaussianLikelihood()
    step.bound = gpytorch.mlls.VariationalELBO(step.likelihood, step.network, 1000)
    return step


@pattern("gpytorch", (32, 128), "gpytorch gpytorch.models.deep_gps", lambda: noise((4,), ()))
def gpytorch_deep_gp(gpytorch: Any, deep: Any) -> Any:
    """Two layers of Gaussian processes, sampled."""
    class Layer(deep.DeepGPLayer):
        def __init__(self, inputs: int, outputs: int | None) -> None:
            shape = torch.Size([outputs] if outputs else [])
            posterior = gpytorch.variational.CholeskyVariationalDistribution(32, batch_shape=shape)
            points = torch.randn(*shape, 32, inputs)
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, posterior), inputs, outputs)
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=shape)
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(
                batch_shape=shape, ard_num_dims=inputs), batch_shape=shape)

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Deep(deep.DeepGP):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.last = Layer(4, 3), Layer(3, None)
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

        def forward(self, x: Any) -> Any:
            return self.last(self.hidden(x))

    network = Deep()
    bound = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(network.likelihood, network, 1000))
    return network, lambda n, b: -bound(n(b[0]), b[1])


@pattern("botorch", (32, 64), "botorch.models:SingleTaskGP gpytorch.mlls:ExactMarginalLogLikelihood",
    lambda: data(lambda _: (torch.rand(4).double(), torch.rand(()).double())))
def botorch_exact_gp(gp: Any, likelihood: Any) -> Step:
    """The exact marginal likelihood of each batch's points."""
    class Exact(Step):
        def __init__(self) -> None:
            super().__init__(gp(torch.rand(8, 4).double(), torch.rand(8, 1).double()), None)
            self.bound = likelihood(self.network.likelihood, self.network)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.network.set_train_data(*batch, strict=False)
            return -self.bound(self.network(batch[0]), batch[1])

    return Exact()


@pattern("pyro-ppl", (16, 64), "pyro pyro.distributions pyro.infer:Trace_ELBO", lambda: noise((64,), (1,)))
def pyro_svi_vae(pyro: Any, dist: Any, bound: Any) -> Step:
    """A variational autoencoder with Pyro's loss as a differentiable function."""
    class Vae(Step):
        def __init__(self) -> None:
            super().__init__(mlp(64, 128, 16, 1), None)
            self.decoder = mlp(8, 128, 64, 1)

        def model(self, x: Tensor) -> None:
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(x.new_zeros(len(x), 8), 1.0).to_event(1))
                pyro.sample("x", dist.Normal(self.decoder(z), 0.1).to_event(1), obs=x)

        def guide(self, x: Tensor) -> None:
            with pyro.plate("data", len(x)):
                mean, spread = self.network(x).chunk(2, -1)
                pyro.sample("z", dist.Normal(mean, F.softplus(spread)).to_event(1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return bound().differentiable_loss(self.model, self.guide, batch[0])

    return Vae()


# Flows ---------------------------------------------------------------------------------------------------------------

FLOW = "nflows.flows.base:Flow nflows.distributions.normal:StandardNormal nflows.transforms"
row("masked_affine_flow", "nflows", (32, 128), FLOW, lambda flow, normal, t: flow(t.CompositeTransform(
    [t.MaskedAffineAutoregressiveTransform(8, 64) for _ in range(3)]), normal([8])), lambda: noise((8,), (1,)),
    lambda n, b: -n.log_prob(b[0]).mean())
row("zuko_spline_flow", "zuko", (32, 128), "zuko", lambda zuko: zuko.flows.NSF(8, 4, transforms=2,
    hidden_features=(64, 64)), lambda: noise((8,), (4,)), lambda n, b: -n(b[1]).log_prob(b[0]).mean())


@pattern("normflows", (32, 128), "normflows", lambda: noise((8,), (1,)), lambda n, b: n.forward_kld(b[0]))
def real_nvp(nf: Any) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nf.flows.AffineCouplingBlock(nf.nets.MLP([4, 64, 64, 8], init_zeros=True)),
            nf.flows.Permute(8, mode="swap")]
    return nf.NormalizingFlow(nf.distributions.DiagGaussian(8), layers)


@pattern("normflows", (4, 16), "normflows", lambda: images(16), lambda n, b: n.forward_kld(b[0]))
def glow(nf: Any) -> nn.Module:
    flows = [nf.flows.GlowBlock(12, 32, split_mode="channel", scale=True) for _ in range(3)]
    base = [nf.distributions.DiagGaussian((12, 8, 8))]
    return nf.MultiscaleFlow(base, [[*flows, nf.flows.Squeeze()]], [])


@pattern("torchcfm", (32, 128), "torchcfm.conditional_flow_matching", lambda: noise((16,), (1,)))
def flow_matching(cfm: Any) -> Any:
    """Pairs of noise and data by optimal transport, computed by POT on the CPU."""
    matcher = cfm.ExactOptimalTransportConditionalFlowMatcher(sigma=0.0)

    def loss(network: nn.Module, batch: Any) -> Tensor:
        t, x, velocity = matcher.sample_location_and_conditional_flow(torch.randn_like(batch[0]), batch[0])
        return F.mse_loss(network(torch.cat([x, t[:, None]], 1)), velocity)

    return mlp(17, 256, 16), loss


# Reinforcement learning, privacy -------------------------------------------------------------------------------------


def losses(network: nn.Module, batch: Any) -> Any:
    return network(of("tensordict:TensorDict")(batch, [len(batch["observation"])]))


def proximal(network: nn.Module, batch: Any) -> Tensor:
    found = losses(network, batch)
    return found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]


def reinforced(network: nn.Module, batch: Any) -> Tensor:
    return sum(value for name, value in losses(network, batch).items() if name.startswith("loss"))


def experience(kind: str) -> Callable[[int, int], Any]:
    def sample(i: int) -> Any:
        if kind == "ppo":
            numbers = {name: torch.randn(()) for name in ("action_log_prob", "sample_log_prob")}
            ones = {name: torch.randn(1) for name in ("advantage", "value_target")}
            return {"observation": torch.randn(16), "action": torch.rand(4) - 0.5, **numbers, **ones}
        done = {"done": torch.zeros(1, dtype=torch.bool), "terminated": torch.zeros(1, dtype=torch.bool)}
        after = {"observation": torch.randn(16), "reward": torch.randn(1), **done}
        return {"observation": torch.randn(16), "action": torch.tensor(i % 4) if kind == "dqn" else torch.rand(
            4) - 0.5, "next": after}

    return data(sample)


CONTROL = "torchrl.modules tensordict.nn torchrl.objectives"


def actor(m: Any, n: Any, body: nn.Module, with_log_prob: bool) -> Any:
    steered = n.TensorDictModule(nn.Sequential(body, m.NormalParamExtractor()), ["observation"], ["loc", "scale"])
    return m.ProbabilisticActor(steered, in_keys=["loc", "scale"], distribution_class=m.TanhNormal,
        return_log_prob=with_log_prob)


@pattern("torchrl", (32, 128), CONTROL, lambda: experience("ppo"), proximal)
def torchrl_ppo(m: Any, n: Any, objectives: Any) -> nn.Module:
    policy = actor(m, n, mlp(16, 64, 8, 1), True)
    return objectives.ClipPPOLoss(policy, m.ValueOperator(mlp(16, 64, 1, 1)))


@pattern("torchrl", (32, 128), CONTROL, lambda: experience("dqn"), reinforced)
def torchrl_dqn(m: Any, _: Any, objectives: Any) -> nn.Module:
    criterion = objectives.DQNLoss(m.QValueActor(mlp(16, 128, 4), in_keys=["observation"],
        action_space="categorical"), action_space="categorical")
    criterion.make_value_estimator(gamma=0.99)
    return criterion


@pattern("torchrl", (32, 128), CONTROL, lambda: experience("sac"), reinforced)
def torchrl_sac(m: Any, n: Any, objectives: Any) -> nn.Module:
    policy = actor(m, n, mlp(16, 128, 8), False)
    critic = m.ValueOperator(Net(lambda s, o, a: s.net(torch.cat([o, a], -1)), net=mlp(20, 128, 1)),
        in_keys=["observation", "action"])
    criterion = objectives.SACLoss(policy, critic, num_qvalue_nets=2, action_spec=None, target_entropy=-4.0)
    criterion.make_value_estimator(gamma=0.99)
    return criterion


def ppo(network: nn.Module, batch: Any) -> Tensor:
    seen, action, old, advantage, target = batch
    values, log_prob, entropy = network.evaluate_actions(seen, action)
    ratio = (log_prob - old).exp()
    clipped = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
    return F.mse_loss(values.flatten(), target) * 0.5 - clipped - 0.01 * entropy.mean()


# Stable-Baselines3's policy for images, with the loss of its PPO.
row("sb3_ppo_policy", "stable-baselines3", (16, 64), "", lambda: of(
    "stable_baselines3.common.policies:ActorCriticCnnPolicy")(of("gymnasium.spaces").Box(0, 255, (3, 64, 64), np.uint8),
    of("gymnasium.spaces").Discrete(4), lambda _: 1e-4), lambda: data(lambda i: (torch.randint(256, (3, 64, 64),
    dtype=torch.uint8), i % 4, *(torch.randn(()) for _ in range(3)))), ppo)
# Hooks keep each sample's gradient; the optimizer clips them.
row("opacus_private_sgd", "opacus", (16, 64), "opacus:GradSampleModule opacus.optimizers:DPOptimizer",
    lambda hooked, dp: Step(hooked(mlp(64, 128)), classify, lambda p: dp(torch.optim.SGD(p, lr=0.1),
    noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=16)), lambda: classed(64))

# Tables and recommendations ------------------------------------------------------------------------------------------


def columns() -> Callable[[int, int], Any]:
    return data(lambda i: (torch.randint(20, (6,)), torch.randn(10), i % 3))


def joined(batch: Any) -> Tensor:
    return torch.cat([batch[0].float(), batch[1]], 1)


def sparse(network: nn.Module, batch: Any) -> Tensor:
    out, sparsity = network(joined(batch))
    return F.cross_entropy(out, batch[2]) - 1e-3 * sparsity


def of_an_ensemble(network: nn.Module, batch: Any) -> Tensor:
    out = network(batch[1], batch[0])
    return F.cross_entropy(out.flatten(0, 1), batch[2].repeat_interleave(out.shape[1]))


row("ft_transformer", "rtdl-revisiting-models", (32, 128), "rtdl_revisiting_models:FTTransformer",
    lambda net: net(n_cont_features=10, cat_cardinalities=[20] * 6, d_out=3, **net.get_default_kwargs(n_blocks=2)),
    columns, lambda n, b: F.cross_entropy(n(b[1], b[0]), b[2]), adamw)
row("tab_transformer", "tab-transformer-pytorch", (32, 128), "tab_transformer_pytorch:TabTransformer",
    lambda net: net(categories=(20,) * 6, num_continuous=10, dim=32, dim_out=3, depth=2, heads=4, mlp_act=nn.ReLU()),
    columns, lambda n, b: F.cross_entropy(n(b[0], b[1]), b[2]))
row("tabnet", "pytorch-tabnet", (64, 256), "", lambda: of("pytorch_tabnet.tab_network:TabNet")(16, 3,
    cat_idxs=list(range(6)), cat_dims=[20] * 6, cat_emb_dim=[2] * 6, group_attention_matrix=torch.eye(16)), columns,
    sparse)
row("tabm_ensemble", "tabm", (64, 256), "", lambda: of("tabm:TabM").make(n_num_features=10, cat_cardinalities=[20] * 6,
    d_out=3, d_block=64), columns, of_an_ensemble, adamw)  # 32 that share their weights
row("periodic_embeddings", "rtdl-num-embeddings", (64, 256), "", lambda: nn.Sequential(of(
    "rtdl_num_embeddings:PeriodicEmbeddings")(10, 24, lite=False), nn.Flatten(), mlp(240, 128, 3)), columns,
    lambda n, b: F.cross_entropy(n(b[1]), b[2]))


@pattern("deepctr-torch", (64, 256), "", columns, lambda n, b: F.binary_cross_entropy(n(joined(b)).squeeze(1),
    (b[2] > 0).float()) + n.get_regularization_loss().sum())
def deep_fm() -> nn.Module:
    inputs = of("deepctr_torch.inputs")
    sparse = [inputs.SparseFeat(f"c{i}", 20, embedding_dim=8) for i in range(6)]
    features = [*sparse, *(inputs.DenseFeat(f"n{i}", 1) for i in range(10))]
    return of("deepctr_torch.models:DeepFM")(features, features, task="binary", device="cpu")


def tabular(config: str, **options: Any) -> Run:
    """The library's own LightningModule and loader, made as its `TabularModel.fit` makes them."""
    import pandas as pd

    table, settings = of("pytorch_tabular:TabularModel"), of("pytorch_tabular.config")
    random, numbers = np.random.default_rng(0), [f"n{i}" for i in range(8)]
    frame = pd.DataFrame({name: random.normal(size=2048) for name in numbers})
    frame["c"], frame["y"] = random.integers(0, 5, 2048).astype(str), random.integers(0, 3, 2048)

    def made(batch_size: int) -> tuple[Any, Any]:
        model = table(
            data_config=settings.DataConfig(target=["y"], continuous_cols=numbers, categorical_cols=["c"]),
            model_config=of(f"pytorch_tabular.models:{config}")(task="classification", **options),
            optimizer_config=settings.OptimizerConfig(),
            trainer_config=settings.TrainerConfig(batch_size=batch_size, accelerator="cpu", checkpoints=None,
                load_best=False, progress_bar="none"), verbose=False, suppress_lightning_logger=True)
        return model, model.prepare_dataloader(train=frame, validation=frame[:64], seed=0)

    known, data_of_one = made(8)
    return Run(lambda: known.prepare_model(data_of_one),
        lambda batch_size, batches: made(batch_size)[1].train_dataloader(), {"limit_val_batches": 0})


TABULAR: dict[str, tuple[str, dict[str, Any]]] = {"tabnet": ("TabNetModelConfig", {"n_steps": 2}),
    "node": ("NodeConfig", {"num_trees": 64, "num_layers": 1, "depth": 4}),
    "auto_int": ("AutoIntConfig", {"num_heads": 2, "num_attn_blocks": 2}),
    "ft_transformer": ("FTTransformerConfig", {"num_heads": 4, "num_attn_blocks": 2, "input_embed_dim": 32})}
for name, (config, options) in TABULAR.items():
    add(f"pytorch_tabular_{name}", "pytorch-tabular", (64, 256), lambda c=config, o=options: tabular(c, **o))

# Cells, satellites, brains ------------------------------------------------------------------------------------------


def scvi() -> Run:
    table = of("anndata:AnnData")(np.random.default_rng(0).poisson(2.0, (512, 200)).astype(np.float32))
    of("scvi.model:SCVI").setup_anndata(table)
    make = lambda: of("scvi.model:SCVI")(table, n_hidden=64)  # noqa: E731
    return Run(lambda: of("scvi.train:TrainingPlan")(make().module), lambda batch_size, batches: of(
        "scvi.dataloaders:DataSplitter")(make().adata_manager, batch_size=batch_size), {"limit_val_batches": 0})


def torchgeo(task: str, columns: dict[str, Callable[[int], Any]], **options: Any) -> Run:
    """With validation, whose loss its scheduler asks for."""
    train = dictionary(**columns)

    def module(batch_size: int, batches: int) -> Any:
        sets = train(batch_size, batches).dataset, train(batch_size, 1).dataset
        return of("lightning.pytorch:LightningDataModule").from_datasets(*sets, batch_size=batch_size)

    return Run(lambda: of(f"torchgeo.trainers:{task}")(in_channels=4, weights=None, **options), module)


IMAGE: dict[str, Callable[[int], Any]] = {"image": lambda _: torch.rand(4, 64, 64)}
MASK: dict[str, Callable[[int], Any]] = {"mask": lambda _: torch.randint(5, (64, 64))}
add("scvi_vae", "scvi-tools", (32, 128), scvi)
add("torchgeo_segmentation", "torchgeo", (4, 8), lambda: torchgeo("SemanticSegmentationTask", {**IMAGE, **MASK},
    model="unet", backbone="resnet18", num_classes=5, loss="focal"))
add("torchgeo_simclr", "torchgeo", (4, 8), lambda: torchgeo("SimCLRTask", IMAGE, model="resnet18", size=64, layers=2,
    hidden_dim=64, output_dim=32))
for name, model in (("eegnet", "EEGNet"), ("conformer", "EEGConformer")):
    row(f"braindecode_{name}", "braindecode", (4, 16), "", lambda m=model: of(f"braindecode.models:{m}")(
        n_chans=22, n_outputs=10, n_times=500), lambda: classed(22, 500))
