"""Libraries for science: neural operators, graphs, Gaussian processes, flows, equivariance, reinforcement learning."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from field.pattern import Net, Run, Step, data, mlp, of, pattern, regress, regression

# Neural operators ----------------------------------------------------------------------------------------------------


@pattern("neuraloperator", sizes=(4, 16))
def fno() -> Run:
    from neuralop.models import FNO

    return Run(
        lambda: Step(FNO((8, 8), 1, 1, hidden_channels=16, n_layers=2), regress),
        data(lambda _: (torch.randn(1, 32, 32), torch.randn(1, 32, 32))),
    )


# Graphs --------------------------------------------------------------------------------------------------------------


def graphs(network: Callable[[], nn.Module], nodes: tuple[int, int] = (10, 30)) -> Run:
    """Molecules of different sizes, with PyTorch Geometric's own loader."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import global_mean_pool

    def pooled(m: Net, batch: Any) -> Tensor:
        return m.head(global_mean_pool(m.net(batch.x, batch.edge_index), batch.batch))

    counts = torch.randint(*nodes, (64,)).tolist()
    counts[0] = nodes[1]
    samples = [
        Data(x=torch.randn(n, 16), edge_index=torch.randint(n, (2, 3 * n)), y=torch.tensor([i % 4]))
        for i, n in enumerate(counts)
    ]
    return Run(
        lambda: Step(Net(pooled, net=network(), head=nn.Linear(64, 4)), lambda n, b: F.cross_entropy(n(b), b.y)),
        lambda batch_size, batches: DataLoader(samples * (1 + batch_size * batches // 64), batch_size=batch_size),
    )


@pattern("torch-geometric", sizes=(8, 32))
def graph_convolutions() -> Run:
    from torch_geometric.nn import GCN

    return graphs(lambda: GCN(16, 64, 3))


# Gaussian processes and probabilistic programs -----------------------------------------------------------------------


@pattern("gpytorch", sizes=(64, 256))
def gpytorch_svgp() -> Run:
    import gpytorch

    class Gp(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points = torch.randn(64, 4)
            posterior = gpytorch.variational.CholeskyVariationalDistribution(64)
            super().__init__(
                gpytorch.variational.VariationalStrategy(self, points, posterior, learn_inducing_locations=True)
            )
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Regression(Step):
        def __init__(self) -> None:
            super().__init__(Gp(), None)
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
            self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.network, 1000)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return -self.bound(self.network(batch[0]), batch[1])

    return Run(Regression, data(lambda _: (torch.randn(4), torch.randn(()))))


@pattern("botorch", sizes=(32, 64))
def botorch_exact_gp() -> Run:
    """The exact marginal likelihood of each batch's points."""
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    class Exact(Step):
        def __init__(self) -> None:
            super().__init__(SingleTaskGP(torch.rand(8, 4).double(), torch.rand(8, 1).double()), None)
            self.bound = ExactMarginalLogLikelihood(self.network.likelihood, self.network)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.network.set_train_data(*batch, strict=False)
            return -self.bound(self.network(batch[0]), batch[1])

    return Run(Exact, data(lambda _: (torch.rand(4).double(), torch.rand(()).double())))


@pattern("pyro-ppl", sizes=(16, 64))
def pyro_svi_vae() -> Run:
    """A variational autoencoder with Pyro's loss as a differentiable function."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import Trace_ELBO

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
            return Trace_ELBO().differentiable_loss(self.model, self.guide, batch[0])

    return Run(Vae, regression(64))


# Flows ---------------------------------------------------------------------------------------------------------------


@pattern("nflows", sizes=(32, 128))
def masked_affine_flow() -> Run:
    from nflows.distributions.normal import StandardNormal
    from nflows.flows.base import Flow
    from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform
    from nflows.transforms.base import CompositeTransform

    def build() -> Step:
        layers = [MaskedAffineAutoregressiveTransform(8, 64) for _ in range(3)]
        return Step(Flow(CompositeTransform(layers), StandardNormal([8])), lambda n, b: -n.log_prob(b[0]).mean())

    return Run(build, regression(8))


@pattern("zuko", sizes=(32, 128))
def zuko_spline_flow() -> Run:
    import zuko

    return Run(
        lambda: Step(
            zuko.flows.NSF(8, 4, transforms=2, hidden_features=(64, 64)), lambda n, b: -n(b[1]).log_prob(b[0]).mean()
        ),
        data(lambda _: (torch.randn(8), torch.randn(4))),
    )


@pattern("normflows", sizes=(32, 128))
def real_nvp() -> Run:
    import normflows as nf

    def build() -> Step:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [
                nf.flows.AffineCouplingBlock(nf.nets.MLP([4, 64, 64, 8], init_zeros=True)),
                nf.flows.Permute(8, mode="swap"),
            ]
        return Step(nf.NormalizingFlow(nf.distributions.DiagGaussian(8), layers), lambda n, b: n.forward_kld(b[0]))

    return Run(build, regression(8))


# Equivariance --------------------------------------------------------------------------------------------------------


@pattern("e3nn", sizes=(16, 64))
def e3nn_tensor_product() -> Run:
    from e3nn import o3

    spherical = o3.Irreps("1x0e + 1x1o + 1x2e")

    def compute(m: Net, x: Tensor, position: Tensor) -> Tensor:
        return m.head(m.product(x, o3.spherical_harmonics(spherical, position, True)))

    def network() -> Net:
        product = o3.FullyConnectedTensorProduct("8x0e + 8x1o", spherical, "8x0e + 8x1o")
        return Net(compute, product=product, head=o3.Linear("8x0e + 8x1o", "1x0e"))

    return Run(
        lambda: Step(network(), lambda n, b: F.mse_loss(n(b[0], b[1]), b[2])),
        data(lambda _: (torch.randn(32), torch.randn(3), torch.randn(1))),
    )


# Reinforcement learning, privacy -------------------------------------------------------------------------------------


@pattern("torchrl", sizes=(32, 128))
def torchrl_ppo() -> Run:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss

    def build() -> Step:
        net = nn.Sequential(mlp(16, 64, 8, 1), NormalParamExtractor())
        policy = ProbabilisticActor(
            TensorDictModule(net, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=TanhNormal,
            return_log_prob=True,
        )
        criterion = ClipPPOLoss(policy, ValueOperator(mlp(16, 64, 1, 1)))

        def loss(network: nn.Module, batch: Any) -> Tensor:
            found = network(TensorDict(batch, [len(batch["observation"])]))
            return found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]

        return Step(criterion, loss)

    def sample(_: int) -> Any:
        numbers = {name: torch.randn(()) for name in ("action_log_prob", "sample_log_prob")}
        ones = {name: torch.randn(1) for name in ("advantage", "value_target")}
        return {"observation": torch.randn(16), "action": torch.rand(4) - 0.5, **numbers, **ones}

    return Run(build, data(sample))


@pattern("opacus", sizes=(16, 64))
def opacus_private_sgd() -> Run:
    """Hooks keep each sample's gradient; the optimizer clips them."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    class Private(Step):
        def __init__(self) -> None:
            super().__init__(GradSampleModule(mlp(64, 128)), None)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            inner = torch.optim.SGD(self.network.parameters(), lr=0.1)
            return DPOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=16)

    return Run(Private, data(lambda i: (torch.randn(64), i % 10)))


# Tables and recommendations ------------------------------------------------------------------------------------------


def columns(categories: int = 6, numbers: int = 10) -> Callable[[int, int], Any]:
    return data(lambda i: (torch.randint(20, (categories,)), torch.randn(numbers), i % 3))


@pattern("rtdl-revisiting-models", sizes=(32, 128))
def ft_transformer() -> Run:
    from rtdl_revisiting_models import FTTransformer

    def build() -> Step:
        options = FTTransformer.get_default_kwargs(n_blocks=2)
        network = FTTransformer(n_cont_features=10, cat_cardinalities=[20] * 6, d_out=3, **options)
        return Step(network, lambda n, b: F.cross_entropy(n(b[1], b[0]), b[2]), lambda p: torch.optim.AdamW(p, 1e-4))

    return Run(build, columns())


@pattern("tab-transformer-pytorch", sizes=(32, 128))
def tab_transformer() -> Run:
    from tab_transformer_pytorch import TabTransformer

    def build() -> Step:
        network = TabTransformer(
            categories=(20,) * 6, num_continuous=10, dim=32, dim_out=3, depth=2, heads=4, mlp_act=nn.ReLU()
        )
        return Step(network, lambda n, b: F.cross_entropy(n(b[0], b[1]), b[2]))

    return Run(build, columns())


def tabular(config: str, **options: Any) -> Run:
    """The library's own LightningModule and loader, made as its `TabularModel.fit` makes them."""
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig

    random = np.random.default_rng(0)
    frame = pd.DataFrame({f"n{i}": random.normal(size=2048) for i in range(8)})
    frame["c"], frame["y"] = random.integers(0, 5, 2048).astype(str), random.integers(0, 3, 2048)

    def made(batch_size: int) -> tuple[Any, Any]:
        model = TabularModel(
            data_config=DataConfig(target=["y"], continuous_cols=[f"n{i}" for i in range(8)], categorical_cols=["c"]),
            model_config=of(f"pytorch_tabular.models:{config}")(task="classification", **options),
            optimizer_config=OptimizerConfig(),
            trainer_config=TrainerConfig(
                batch_size=batch_size, accelerator="cpu", checkpoints=None, load_best=False, progress_bar="none"
            ),
            verbose=False,
            suppress_lightning_logger=True,
        )
        return model, model.prepare_dataloader(train=frame, validation=frame[:64], seed=0)

    known, data_of_one = made(8)
    return Run(
        lambda: known.prepare_model(data_of_one),
        lambda batch_size, batches: made(batch_size)[1].train_dataloader(),
        {"limit_val_batches": 0},
    )


@pattern("pytorch-tabular", sizes=(64, 256))
def pytorch_tabular_ft_transformer() -> Run:
    return tabular("FTTransformerConfig", num_heads=4, num_attn_blocks=2, input_embed_dim=32)
