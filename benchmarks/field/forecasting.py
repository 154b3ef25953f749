"""Libraries for time series: pytorch-forecasting, neuralforecast, GluonTS, and neural differential equations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from field.pattern import POOL, Run, Step, classifier, classify, data, pattern, regress

# pytorch-forecasting -------------------------------------------------------------------------------------------------


def forecasting(
    model: Callable[[Any], pl.LightningModule],
    encoder: int = 30,
    horizon: int = 10,
    variable: bool = False,
    **known: Any,
) -> Run:
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
        "min_encoder_length": encoder // 2 if variable else encoder,
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
        return TemporalFusionTransformer.from_dataset(
            dataset,
            hidden_size=32,
            attention_head_size=4,
            hidden_continuous_size=16,
            lstm_layers=1,
            loss=QuantileLoss(),
            log_interval=-1,
            learning_rate=1e-3,
        )

    return forecasting(model, **COVARIATES)


@pattern("pytorch-forecasting", sizes=(16, 64))
def temporal_fusion_transformer_variable() -> Run:
    from pytorch_forecasting import TemporalFusionTransformer

    def model(dataset: Any) -> pl.LightningModule:
        return TemporalFusionTransformer.from_dataset(dataset, hidden_size=16, log_interval=-1, learning_rate=1e-3)

    return forecasting(model, variable=True, **COVARIATES)


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


@pattern("neuralforecast", sizes=(16, 64))
def neural_patchtst() -> Run:
    """A model of neuralforecast with its own datamodule: a batch is of series, the step cuts windows."""
    import pandas as pd
    from neuralforecast.models import PatchTST
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

    rows = [(str(s), t, float(np.sin(t / 5 + s))) for s in range(192) for t in range(90)]
    dataset, *_ = TimeSeriesDataset.from_df(pd.DataFrame(rows, columns=["unique_id", "ds", "y"]))

    def build() -> pl.LightningModule:
        sizes = {"windows_batch_size": 128, "hidden_size": 32, "n_heads": 4, "linear_hidden_size": 64}
        return PatchTST(h=12, input_size=24, max_steps=10, **sizes)

    return Run(build, lambda batch_size, batches: TimeSeriesDataModule(dataset, batch_size=batch_size))


# GluonTS -------------------------------------------------------------------------------------------------------------


@pattern("gluonts", sizes=(16, 64))
def gluonts_deepar() -> Run:
    from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule

    def build() -> pl.LightningModule:
        kwargs = {
            "freq": "D",
            "context_length": 20,
            "prediction_length": 10,
            "num_feat_dynamic_real": 1,
            "num_feat_static_real": 1,
            "num_feat_static_cat": 1,
            "cardinality": [10],
            "num_layers": 2,
            "hidden_size": 40,
            "lags_seq": [1, 2, 7],
        }
        return DeepARLightningModule(model_kwargs=kwargs)

    def sample(_: int) -> Any:
        return {
            "feat_static_cat": torch.randint(10, (1,)),
            "feat_static_real": torch.randn(1),
            "past_time_feat": torch.randn(27, 1),
            "past_target": torch.rand(27),
            "past_observed_values": torch.ones(27),
            "future_time_feat": torch.randn(10, 1),
            "future_target": torch.rand(10),
            "future_observed_values": torch.ones(10),
        }

    return Run(build, data(sample))


# Differential equations and liquid networks --------------------------------------------------------------------------


class Field(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, width))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


class Ode(nn.Module):
    def __init__(self, solve: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self.field, self.head, self.solve, self.options = Field(), nn.Linear(32, 10), solve, options

    def forward(self, x: Tensor) -> Tensor:
        times = torch.tensor([0.0, 1.0], device=x.device)
        return self.head(self.solve(self.field, x, times, **self.options)[-1])


@pattern("torchdiffeq", sizes=(16, 64))
def neural_ode_dopri5() -> Run:
    from torchdiffeq import odeint

    return Run(classifier(lambda: Ode(odeint, rtol=1e-4, atol=1e-5)), data(lambda i: (torch.randn(32), i % 10)))


@pattern("torchdiffeq", sizes=(16, 64))
def neural_ode_rk4_adjoint() -> Run:
    from torchdiffeq import odeint_adjoint

    return Run(
        classifier(lambda: Ode(odeint_adjoint, method="rk4", options={"step_size": 0.1})),
        data(lambda i: (torch.randn(32), i % 10)),
    )


@pattern("torchcde", sizes=(16, 64))
def neural_cde() -> Run:
    import torchcde

    class Cde(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.field, self.head = nn.Linear(3, 16), nn.Linear(16, 48), nn.Linear(16, 10)

        def forward(self, coefficients: Tensor) -> Tensor:
            path = torchcde.CubicSpline(coefficients)
            z = torchcde.cdeint(
                path,
                lambda t, z: self.field(z).tanh().view(*z.shape, 3),
                self.start(path.evaluate(path.interval[0])),
                path.interval,
                method="rk4",
                options={"step_size": 1.0},
                adjoint=False,
            )
            return self.head(z[:, -1])

    coefficients = torchcde.hermite_cubic_coefficients_with_backward_differences(torch.randn(POOL, 12, 3))
    return Run(classifier(Cde), data(lambda i: (coefficients[i], i % 10)))


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

    class Liquid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = CfC(8, AutoNCP(32, 10), batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)[0][:, -1]

    return Run(classifier(Liquid), data(lambda i: (torch.randn(24, 8), i % 10)))


@pattern("xlstm", sizes=(4, 8))
def xlstm_language_model() -> Run:
    from xlstm import (
        FeedForwardConfig,
        mLSTMBlockConfig,
        mLSTMLayerConfig,
        sLSTMBlockConfig,
        sLSTMLayerConfig,
        xLSTMBlockStack,
        xLSTMBlockStackConfig,
    )

    def build() -> pl.LightningModule:
        config = xLSTMBlockStackConfig(
            mlstm_block=mLSTMBlockConfig(
                mlstm=mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4)
            ),
            slstm_block=sLSTMBlockConfig(
                slstm=sLSTMLayerConfig(backend="vanilla", num_heads=4, conv1d_kernel_size=4),
                feedforward=FeedForwardConfig(proj_factor=1.3, act_fn="gelu"),
            ),
            context_length=32,
            num_blocks=3,
            embedding_dim=64,
            slstm_at=[1],
        )
        return Step(xLSTMBlockStack(config), regress)

    return Run(build, data(lambda _: (torch.randn(32, 64), torch.randn(32, 64))))


@pattern("snntorch", sizes=(16, 64))
def spiking_network() -> Run:
    import snntorch

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.one = nn.Linear(100, 128), snntorch.Leaky(beta=0.9)
            self.second, self.two = nn.Linear(128, 10), snntorch.Leaky(beta=0.9)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.one.init_leaky(), self.two.init_leaky()
            out = []
            for _ in range(20):
                spikes, a = self.one(self.first(x), a)
                _, b = self.two(self.second(spikes), b)
                out.append(b)
            return torch.stack(out).sum(0)

    return Run(lambda: Step(Spiking(), classify), data(lambda i: (torch.randn(100), i % 10)))
