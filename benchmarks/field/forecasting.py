"""Libraries for time series: pytorch-forecasting, neuralforecast, GluonTS, and neural differential equations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from field.pattern import POOL, Net, Run, Step, classifier, data, of, pattern, regress, vectors

# pytorch-forecasting -------------------------------------------------------------------------------------------------


def forecasting(model: Callable[[Any], pl.LightningModule], encoder: int = 30, horizon: int = 10, **known: Any) -> Run:
    """A model made by `from_dataset` of a data frame with a store, a price and a day, and the library's own loader."""
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    steps, series = 80, 40
    rows = [
        (str(s), t, float(np.sin(t / 5 + s) + 2), float(t % 7), str(t % 7)) for s in range(series) for t in range(steps)
    ]
    frame = pd.DataFrame(rows, columns=["store", "time_idx", "sales", "price", "day"])
    options: dict[str, Any] = {
        "group_ids": ["store"],
        "time_idx": "time_idx",
        "target": "sales",
        "max_encoder_length": encoder,
        "min_encoder_length": encoder,
        "max_prediction_length": horizon,
        "time_varying_unknown_reals": ["sales"],
        **known,
    }
    dataset = TimeSeriesDataSet(frame, **options)
    return Run(
        lambda: model(dataset),
        lambda batch_size, batches: dataset.to_dataloader(train=True, batch_size=batch_size, num_workers=0),
        {"gradient_clip_val": 0.1},
    )


COVARIATES = {
    "static_categoricals": ["store"],
    "time_varying_known_categoricals": ["day"],
    "time_varying_known_reals": ["time_idx", "price"],
    "add_relative_time_idx": True,
    "add_target_scales": True,
    "add_encoder_length": True,
}


@pattern("pytorch-forecasting", sizes=(16, 64))
def temporal_fusion_transformer() -> Run:
    from pytorch_forecasting import TemporalFusionTransformer
    from pytorch_forecasting.metrics import QuantileLoss

    def model(dataset: Any) -> pl.LightningModule:
        sizes = {"hidden_size": 32, "attention_head_size": 4, "hidden_continuous_size": 16, "lstm_layers": 1}
        rest = {"loss": QuantileLoss(), "log_interval": -1, "learning_rate": 1e-3}
        return TemporalFusionTransformer.from_dataset(dataset, **sizes, **rest)

    return forecasting(model, **COVARIATES)


@pattern("pytorch-forecasting", sizes=(16, 64))
def deepar() -> Run:
    from pytorch_forecasting import DeepAR

    def model(dataset: Any) -> pl.LightningModule:
        return DeepAR.from_dataset(dataset, hidden_size=32, rnn_layers=2, log_interval=-1, learning_rate=1e-3)

    return forecasting(model, **{k: v for k, v in COVARIATES.items() if not k.startswith("add")})


@pattern("pytorch-forecasting", sizes=(16, 64))
def pf_nhits() -> Run:
    from pytorch_forecasting import NHiTS

    def model(dataset: Any) -> pl.LightningModule:
        return NHiTS.from_dataset(dataset, hidden_size=128, log_interval=-1, learning_rate=1e-3)

    return forecasting(model, time_varying_known_reals=["price"])


# neuralforecast ------------------------------------------------------------------------------------------------------


def neural(model: str, **options: Any) -> Run:
    """A model of neuralforecast with its own datamodule: a batch is of series, the step cuts windows."""
    import pandas as pd
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

    rows = [(str(s), t, float(np.sin(t / 5 + s))) for s in range(192) for t in range(90)]
    dataset, *_ = TimeSeriesDataset.from_df(pd.DataFrame(rows, columns=["unique_id", "ds", "y"]))
    options = {"h": 12, "input_size": 24, "max_steps": 10, "windows_batch_size": 128, **options}
    return Run(
        lambda: of(f"neuralforecast.models:{model}")(**options),
        lambda batch_size, batches: TimeSeriesDataModule(dataset, batch_size=batch_size),
    )


@pattern("neuralforecast", sizes=(16, 64))
def neural_patchtst() -> Run:
    return neural("PatchTST", hidden_size=32, n_heads=4, linear_hidden_size=64)


# GluonTS -------------------------------------------------------------------------------------------------------------


@pattern("gluonts", sizes=(16, 64))
def gluonts_deepar() -> Run:
    from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule

    def build() -> pl.LightningModule:
        numbers = {"num_feat_dynamic_real": 1, "num_feat_static_real": 1, "num_feat_static_cat": 1, "cardinality": [10]}
        sizes = {"context_length": 20, "prediction_length": 10, "num_layers": 2, "hidden_size": 40}
        kwargs = {"freq": "D", "lags_seq": [1, 2, 7], **numbers, **sizes}
        return DeepARLightningModule(model_kwargs=kwargs)

    def sample(_: int) -> Any:
        static = {"feat_static_cat": torch.randint(10, (1,)), "feat_static_real": torch.randn(1)}
        for when, length in (("past", 27), ("future", 10)):
            static |= {f"{when}_time_feat": torch.randn(length, 1), f"{when}_target": torch.rand(length)}
            static[f"{when}_observed_values"] = torch.ones(length)
        return static

    return Run(build, data(sample))


# Differential equations and liquid networks --------------------------------------------------------------------------


def ode(solve: Callable[..., Tensor], **options: Any) -> Run:
    class Field(nn.Sequential):
        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return super().forward(y)

    def compute(m: Net, x: Tensor) -> Tensor:
        return m.head(solve(m.field, x, torch.tensor([0.0, 1.0], device=x.device), **options)[-1])

    def network() -> Net:
        return Net(compute, field=Field(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)), head=nn.Linear(32, 10))

    return Run(classifier(network), vectors(32))


@pattern("torchdiffeq", sizes=(16, 64))
def neural_ode_dopri5() -> Run:
    from torchdiffeq import odeint

    return ode(odeint, rtol=1e-4, atol=1e-5)


@pattern("torchdiffeq", sizes=(16, 64))
def neural_ode_rk4_adjoint() -> Run:
    from torchdiffeq import odeint_adjoint

    return ode(odeint_adjoint, method="rk4", options={"step_size": 0.1})


@pattern("torchcde", sizes=(16, 64))
def neural_cde() -> Run:
    import torchcde

    def compute(m: Net, coefficients: Tensor) -> Tensor:
        path = torchcde.CubicSpline(coefficients)
        field = lambda t, z: m.field(z).tanh().view(*z.shape, 3)  # noqa: E731
        start, how = m.start(path.evaluate(path.interval[0])), {"method": "rk4", "options": {"step_size": 1.0}}
        return m.head(torchcde.cdeint(path, field, start, path.interval, adjoint=False, **how)[:, -1])

    def network() -> Net:
        return Net(compute, start=nn.Linear(3, 16), field=nn.Linear(16, 48), head=nn.Linear(16, 10))

    coefficients = torchcde.hermite_cubic_coefficients_with_backward_differences(torch.randn(POOL, 12, 3))
    return Run(classifier(network), data(lambda i: (coefficients[i], i % 10)))


@pattern("torchsde", sizes=(16, 64))
def neural_sde() -> Run:
    import torchsde

    class Sde(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = nn.Linear(8, 8), nn.Linear(8, 8)

        def f(self, t: Tensor, y: Tensor) -> Tensor:
            return self.drift(y)

        def g(self, t: Tensor, y: Tensor) -> Tensor:
            return self.spread(y).sigmoid()

    def loss(network: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        out = torchsde.sdeint(network, x, torch.linspace(0, 1, 3), dt=0.1, method="euler")
        return nn.functional.mse_loss(out[-1], y)

    return Run(lambda: Step(Sde(), loss), data(lambda _: (torch.randn(8), torch.randn(8))))


@pattern("ncps", sizes=(16, 64))
def liquid_cfc() -> Run:
    from ncps.torch import CfC
    from ncps.wirings import AutoNCP

    network = lambda: Net(lambda m, x: m.net(x)[0][:, -1], net=CfC(8, AutoNCP(32, 10), batch_first=True))  # noqa: E731
    return Run(classifier(network), data(lambda i: (torch.randn(24, 8), i % 10)))


@pattern("xlstm", sizes=(4, 8))
def xlstm_language_model() -> Run:
    import xlstm

    def build() -> pl.LightningModule:
        scalar = xlstm.sLSTMBlockConfig(
            slstm=xlstm.sLSTMLayerConfig(backend="vanilla", num_heads=4, conv1d_kernel_size=4),
            feedforward=xlstm.FeedForwardConfig(proj_factor=1.3, act_fn="gelu"),
        )
        layer = xlstm.mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4)
        blocks = {"mlstm_block": xlstm.mLSTMBlockConfig(mlstm=layer), "slstm_block": scalar, "slstm_at": [1]}
        config = xlstm.xLSTMBlockStackConfig(context_length=32, num_blocks=3, embedding_dim=64, **blocks)
        return Step(xlstm.xLSTMBlockStack(config), regress)

    return Run(build, data(lambda _: (torch.randn(32, 64), torch.randn(32, 64))))


@pattern("snntorch", sizes=(16, 64))
def spiking_network() -> Run:
    import snntorch

    def compute(m: Net, x: Tensor) -> Tensor:
        a, b = m.one.init_leaky(), m.two.init_leaky()
        out = []
        for _ in range(20):
            spikes, a = m.one(m.first(x), a)
            _, b = m.two(m.second(spikes), b)
            out.append(b)
        return torch.stack(out).sum(0)

    def network() -> Net:
        leaks = {"one": snntorch.Leaky(beta=0.9), "two": snntorch.Leaky(beta=0.9)}
        return Net(compute, first=nn.Linear(100, 128), second=nn.Linear(128, 10), **leaks)

    return Run(classifier(network), vectors(100))
