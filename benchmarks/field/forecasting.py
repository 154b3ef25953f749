"""Libraries for time series: pytorch-forecasting, neuralforecast, GluonTS, darts, and neural differential equations."""

# Rows of tables, and names of libraries imported when they are called:
# fmt: off

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from field.pattern import POOL, Net, Run, add, classed, data, dictionary, noise, of, pattern, regress, row

ROWS = (16, 64)

# pytorch-forecasting -------------------------------------------------------------------------------------------------


def forecasting(path: str, known: dict[str, Any], loss: str = "", **sizes: Any) -> Run:
    """A model made by `from_dataset` of a data frame with a store, a price and a day, and the library's own loader."""
    import pandas as pd

    cls, dataset = of(f"pytorch_forecasting.{path}"), of("pytorch_forecasting:TimeSeriesDataSet")
    rows = [(str(s), t, float(np.sin(t / 5 + s) + 2), float(t % 7), str(t % 7)) for s in range(40) for t in range(80)]
    frame = pd.DataFrame(rows, columns=["store", "time_idx", "sales", "price", "day"])
    options = {"group_ids": ["store"], "time_idx": "time_idx", "target": "sales", "max_encoder_length": 30,
        "min_encoder_length": 30, "max_prediction_length": 10, "time_varying_unknown_reals": ["sales"], **known}
    table = dataset(frame, **options)
    criterion = of(f"pytorch_forecasting.metrics:{loss}") if loss else None

    def build() -> Any:
        chosen = {"loss": criterion()} if criterion else {}
        return cls.from_dataset(table, **sizes, **chosen, log_interval=-1, learning_rate=1e-3)

    return Run(build, lambda batch_size, batches: table.to_dataloader(train=True, batch_size=batch_size, num_workers=0),
        {"gradient_clip_val": 0.1})


PLAIN: dict[str, Any] = {"static_categoricals": ["store"], "time_varying_known_categoricals": ["day"],
    "time_varying_known_reals": ["time_idx", "price"]}
PRICE: dict[str, Any] = {"time_varying_known_reals": ["price"]}
ADDED = {f"add_{name}": True for name in ("relative_time_idx", "target_scales", "encoder_length")}
FORECASTING: dict[str, tuple[Any, ...]] = {
    "temporal_fusion_transformer": ("models:TemporalFusionTransformer", {**PLAIN, **ADDED}, {"hidden_size": 32,
        "attention_head_size": 4, "hidden_continuous_size": 16, "lstm_layers": 1}, "QuantileLoss"),
    "deepar": ("models:DeepAR", PLAIN, {"hidden_size": 32, "rnn_layers": 2}),
    "pf_nhits": ("models:NHiTS", PRICE, {"hidden_size": 128}),
    "pf_decoder_mlp": ("models:DecoderMLP", PLAIN, {"hidden_size": 64}),
    "pf_timexer": ("models:TimeXer", PRICE, {"context_length": 30, "prediction_length": 10, "patch_length": 5,
        "hidden_size": 32, "d_ff": 64, "n_heads": 4}, "MAE"),
}
for name, (model, known, sizes, *loss) in FORECASTING.items():
    add(name, "pytorch-forecasting", ROWS, lambda m=model, k=known, s=sizes, rest=loss: forecasting(m, k, *rest, **s))

# neuralforecast, GluonTS, darts --------------------------------------------------------------------------------------


def neural(model: str, **options: Any) -> Run:
    """A model of neuralforecast with its own datamodule: a batch is of series, the step cuts windows."""
    import pandas as pd

    tables = of("neuralforecast.tsdataset")
    rows = [(str(s), t, float(np.sin(t / 5 + s))) for s in range(192) for t in range(90)]
    dataset, *_ = tables.TimeSeriesDataset.from_df(pd.DataFrame(rows, columns=["unique_id", "ds", "y"]))
    options = {"h": 12, "input_size": 24, "max_steps": 10, "windows_batch_size": 128, **options}
    return Run(lambda: of(f"neuralforecast.models:{model}")(**options),
        lambda batch_size, batches: tables.TimeSeriesDataModule(dataset, batch_size=batch_size))


NEURAL: dict[str, tuple[str, dict[str, Any]]] = {
    "patchtst": ("PatchTST", {"hidden_size": 32, "n_heads": 4, "linear_hidden_size": 64}),
    "tft": ("TFT", {"hidden_size": 32, "n_head": 4}),
    "nbeatsx": ("NBEATSx", {"mlp_units": 3 * [[64, 64]]}),
    "timesnet": ("TimesNet", {"hidden_size": 16, "conv_hidden_size": 16, "encoder_layers": 1, "top_k": 3}),
    "autoformer": ("Autoformer", {"hidden_size": 32, "n_head": 4, "conv_hidden_size": 16}),
    "itransformer": ("iTransformer", {"hidden_size": 32, "n_heads": 4, "d_ff": 64, "n_series": 192}),
}
for name, (model, options) in NEURAL.items():
    add(f"neural_{name}", "neuralforecast", ROWS, lambda m=model, o=options: neural(m, **o))

SERIES = {"context_length": 20, "prediction_length": 10}
STATIC: dict[str, Callable[[int], Any]] = {"feat_static_cat": lambda _: torch.randint(10, (1,))}
DEEPAR: dict[str, Callable[[int], Any]] = {**STATIC, "feat_static_real": lambda _: torch.randn(1)}
for when, length in (("past", 27), ("future", 10)):
    DEEPAR |= {f"{when}_time_feat": lambda _, n=length: torch.randn(n, 1), f"{when}_target": lambda _, n=length:
        torch.rand(n), f"{when}_observed_values": lambda _, n=length: torch.ones(n)}
ONES = {"past_target": (20,), "past_observed_values": (20,), "feat_static_real": (1,), "feat_dynamic_real": (30, 1),
    "feat_dynamic_cat": (30, 0), "past_feat_dynamic_real": (20, 0), "past_feat_dynamic_cat": (20, 0),
    "future_target": (10,), "future_observed_values": (10,)}
TFT: dict[str, Callable[[int], Any]] = {k: lambda _, s=shape, k=k: torch.ones(s, dtype=torch.long if "cat" in k else
    torch.float) for k, shape in ONES.items()}
row("gluonts_deepar", "gluonts", ROWS, "gluonts.torch.model.deepar.lightning_module:DeepARLightningModule",
    lambda module: module(model_kwargs={"freq": "D", "lags_seq": [1, 2, 7], "num_feat_dynamic_real": 1,
    "num_feat_static_real": 1, "num_feat_static_cat": 1, "cardinality": [10], **SERIES, "num_layers": 2,
    "hidden_size": 40}), lambda: dictionary(**DEEPAR))
row("gluonts_tft", "gluonts", ROWS, "", lambda: of(
    "gluonts.torch.model.tft.lightning_module:TemporalFusionTransformerLightningModule")(model_kwargs={**SERIES,
    "d_hidden": 32, "c_feat_static_cat": [10], "d_var": 16}), lambda: dictionary(**TFT, **STATIC))


def darts(model: str, **options: Any) -> Run:
    """The module and loader that `fit` of darts makes."""
    import pytorch_lightning as pl

    def made(batch_size: int) -> tuple[Any, Any]:
        waves = [np.sin(np.arange(100, dtype=np.float32) / 5 + s) for s in range(16)]
        quiet = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        forecaster = of(f"darts.models:{model}")(input_chunk_length=24, output_chunk_length=12, batch_size=batch_size,
            **options)
        series = [of("darts:TimeSeries").from_values(wave) for wave in waves]
        dataset, validation, _, *rest = forecaster._setup_for_fit_from_dataset(series)[1]
        _, module, loader, *_ = forecaster._setup_for_train(dataset, validation, quiet, *rest)
        return module, loader

    return Run(lambda: made(8)[0], lambda batch_size, batches: made(batch_size)[1])


add("darts_tsmixer", "u8darts", ROWS, lambda: darts("TSMixerModel", hidden_size=32, ff_size=32))
add("darts_transformer", "u8darts", ROWS, lambda: darts("TransformerModel", d_model=32, nhead=4, dim_feedforward=64))
add("darts_tcn", "u8darts", ROWS, lambda: darts("TCNModel", num_filters=16, weight_norm=True))

# Differential equations, liquid and spiking networks -----------------------------------------------------------------


class Field(nn.Sequential):
    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return super().forward(y)


def ode(solve: Callable[..., Tensor], **options: Any) -> Net:
    def compute(m: Net, x: Tensor) -> Tensor:
        return m.head(solve(m.field, x, torch.tensor([0.0, 1.0], device=x.device), **options)[-1])

    return Net(compute, field=Field(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)), head=nn.Linear(32, 10))


row("neural_ode_dopri5", "torchdiffeq", ROWS, "torchdiffeq:odeint", lambda solve: ode(solve, rtol=1e-4, atol=1e-5),
    lambda: classed(32))
row("neural_ode_rk4_adjoint", "torchdiffeq", ROWS, "torchdiffeq:odeint_adjoint", lambda solve: ode(
    solve, method="rk4", options={"step_size": 0.1}), lambda: classed(32))


def splines() -> Callable[[int, int], Any]:
    found = of("torchcde").hermite_cubic_coefficients_with_backward_differences(torch.randn(POOL, 12, 3))
    return data(lambda i: (found[i], i % 10))


@pattern("torchcde", ROWS, "torchcde", splines)
def neural_cde(torchcde: Any) -> Net:
    def compute(m: Net, coefficients: Tensor) -> Tensor:
        path = torchcde.CubicSpline(coefficients)
        field = lambda t, z: m.field(z).tanh().view(*z.shape, 3)  # noqa: E731
        start, how = m.start(path.evaluate(path.interval[0])), {"method": "rk4", "options": {"step_size": 1.0}}
        return m.head(torchcde.cdeint(path, field, start, path.interval, adjoint=False, **how)[:, -1])

    return Net(compute, start=nn.Linear(3, 16), field=nn.Linear(16, 48), head=nn.Linear(16, 10))


class Sde(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self) -> None:
        super().__init__()
        self.drift, self.spread = nn.Linear(8, 8), nn.Linear(8, 8)

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        return self.drift(y)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        return self.spread(y).sigmoid()


row("neural_sde", "torchsde", ROWS, "torchsde:sdeint", lambda solve: (Sde(), lambda n, b: F.mse_loss(solve(
    n, b[0], torch.linspace(0, 1, 3), dt=0.1, method="euler")[-1], b[1])), lambda: noise((8,), (8,)))
row("liquid_cfc", "ncps", ROWS, "ncps.torch:CfC ncps.wirings:AutoNCP", lambda cfc, wiring: Net(
    lambda m, x: m.net(x)[0][:, -1], net=cfc(8, wiring(32, 10), batch_first=True)), lambda: classed(24, 8))


@pattern("xlstm", (4, 8), "xlstm", lambda: noise((32, 64), (32, 64)), regress)
def xlstm_language_model(x: Any) -> nn.Module:
    cells = x.sLSTMLayerConfig(backend="vanilla", num_heads=4, conv1d_kernel_size=4)
    scalar = x.sLSTMBlockConfig(slstm=cells, feedforward=x.FeedForwardConfig(proj_factor=1.3, act_fn="gelu"))
    layer = x.mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4)
    return x.xLSTMBlockStack(x.xLSTMBlockStackConfig(context_length=32, num_blocks=3, embedding_dim=64,
        mlstm_block=x.mLSTMBlockConfig(mlstm=layer), slstm_block=scalar, slstm_at=[1]))


@pattern("snntorch", ROWS, "snntorch:Leaky", lambda: classed(100))
def spiking_network(leaky: Any) -> Net:
    def compute(m: Net, x: Tensor) -> Tensor:
        a, b = m.one.init_leaky(), m.two.init_leaky()
        out = []
        for _ in range(20):
            spikes, a = m.one(m.first(x), a)
            _, b = m.two(m.second(spikes), b)
            out.append(b)
        return torch.stack(out).sum(0)

    leaks = {"one": leaky(beta=0.9), "two": leaky(beta=0.9)}
    return Net(compute, first=nn.Linear(100, 128), second=nn.Linear(128, 10), **leaks)
