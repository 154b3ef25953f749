"""LightningModules of libraries, with the libraries' own loaders where they have some."""

# Rows of tables, and names of libraries imported when they are called:
# fmt: off

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from field.forecasting import COVARIATES, forecasting, neural
from field.pattern import Run, Step, add, classifier, data, dictionary, of
from field.science import tabular

# Time series ---------------------------------------------------------------------------------------------------------

NEURAL: dict[str, tuple[str, dict[str, Any]]] = {
    "tft": ("TFT", {"hidden_size": 32, "n_head": 4}),
    "nbeatsx": ("NBEATSx", {"mlp_units": 3 * [[64, 64]]}),
    "timesnet": ("TimesNet", {"hidden_size": 16, "conv_hidden_size": 16, "encoder_layers": 1, "top_k": 3}),
    "autoformer": ("Autoformer", {"hidden_size": 32, "n_head": 4, "conv_hidden_size": 16}),
    "itransformer": ("iTransformer", {"hidden_size": 32, "n_heads": 4, "d_ff": 64, "n_series": 192}),
}
for name, (model, options) in NEURAL.items():
    add(f"neural_{name}", "neuralforecast", (16, 64), lambda m=model, o=options: neural(m, **o))

PF = "pytorch_forecasting"
plain = {k: v for k, v in COVARIATES.items() if not k.startswith("add")}
known = {"log_interval": -1, "learning_rate": 1e-3}
add("pf_decoder_mlp", "pytorch-forecasting", (16, 64), lambda: forecasting(
    lambda d: of(f"{PF}:DecoderMLP").from_dataset(d, hidden_size=64, **known), **plain))
add("pf_timexer", "pytorch-forecasting", (16, 64), lambda: forecasting(lambda d: of(
    f"{PF}.models:TimeXer").from_dataset(d, context_length=30, prediction_length=10, patch_length=5, hidden_size=32,
    d_ff=64, n_heads=4, loss=of(f"{PF}.metrics:MAE")(), **known), time_varying_known_reals=["price"]))


def gluonts_tft() -> Run:
    sizes = {"context_length": 20, "prediction_length": 10, "d_hidden": 32, "c_feat_static_cat": [10], "d_var": 16}
    shapes = {"past_target": (20,), "past_observed_values": (20,), "feat_static_real": (1,),
        "feat_dynamic_real": (30, 1), "feat_dynamic_cat": (30, 0), "past_feat_dynamic_real": (20, 0),
        "past_feat_dynamic_cat": (20, 0), "future_target": (10,), "future_observed_values": (10,)}
    columns: dict[str, Any] = {
        k: lambda _, s=s, k=k: torch.ones(s, dtype=torch.long if "cat" in k else torch.float) for k,
        s in shapes.items()}
    module = "gluonts.torch.model.tft.lightning_module:TemporalFusionTransformerLightningModule"
    return Run(lambda: of(module)(model_kwargs=sizes), dictionary(**columns,
        feat_static_cat=lambda _: torch.randint(10, (1,))))


add("gluonts_tft", "gluonts", (16, 64), gluonts_tft)


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


add("darts_tsmixer", "u8darts", (16, 64), lambda: darts("TSMixerModel", hidden_size=32, ff_size=32))
add("darts_transformer", "u8darts", (16, 64), lambda: darts("TransformerModel", d_model=32, nhead=4,
    dim_feedforward=64))
add("darts_tcn", "u8darts", (16, 64), lambda: darts("TCNModel", num_filters=16, weight_norm=True))

# Molecules -----------------------------------------------------------------------------------------------------------


def chemprop() -> Run:
    """Messages along the bonds of molecules, read from SMILES."""
    from chemprop import data as chem
    from chemprop import models
    from chemprop import nn as parts

    smiles = ["C" * (1 + i % 7) + ("c1ccccc1", "O", "N(C)C", "C(=O)O")[i % 4] for i in range(64)]
    smiles[0] = "CCCCCCCc1ccccc1"
    points = [chem.MoleculeDatapoint.from_smi(s, np.array([float(len(s))])) for s in smiles]

    def loader(batch_size: int, batches: int) -> Any:
        dataset = chem.MoleculeDataset(points * (1 + batch_size * batches // 64))
        return chem.build_dataloader(dataset, batch_size=batch_size, shuffle=False)

    return Run(lambda: models.MPNN(parts.BondMessagePassing(d_h=64), parts.MeanAggregation(),
        parts.RegressionFFN(input_dim=64)), loader)


add("chemprop_mpnn", "chemprop", (16, 64), chemprop)


def schnetpack(representation: str) -> Run:
    """Energies, and forces as their slopes: the backward pass is differentiated."""
    of("torch.utils.data.dataloader").T_co = Any  # its release imports this name, which torch 2.13 does not have
    spk = of("schnetpack")
    keys = of("schnetpack.properties")
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
        outputs = [spk.task.ModelOutput(name, torch.nn.MSELoss(), weight, metrics={}) for name,
            weight in (("energy", 0.01), ("forces", 0.99))]
        task = spk.task.AtomisticTask(potential, outputs, torch.optim.AdamW, {"lr": 1e-3})
        task.model.initialize_transforms = lambda datamodule: None
        return task

    return Run(build, data(sample, of("schnetpack.data.loader:_atoms_collate_fn")))


add("schnetpack_painn", "schnetpack", (4, 16), lambda: schnetpack("PaiNN"))
add("schnetpack_schnet", "schnetpack", (4, 16), lambda: schnetpack("SchNet"))

# Cells, satellites, brains ------------------------------------------------------------------------------------------


def scvi() -> Run:
    import anndata

    table = anndata.AnnData(np.random.default_rng(0).poisson(2.0, (512, 200)).astype(np.float32))
    of("scvi.model:SCVI").setup_anndata(table)
    make = lambda: of("scvi.model:SCVI")(table, n_hidden=64)  # noqa: E731
    return Run(lambda: of("scvi.train:TrainingPlan")(make().module), lambda batch_size, batches: of(
        "scvi.dataloaders:DataSplitter")(make().adata_manager, batch_size=batch_size), {"limit_val_batches": 0})


add("scvi_vae", "scvi-tools", (32, 128), scvi)


def torchgeo(task: str, columns: dict[str, Callable[[int], Any]], **options: Any) -> Run:
    """With validation, whose loss its scheduler asks for."""
    train = dictionary(**columns)

    def module(batch_size: int, batches: int) -> Any:
        sets = train(batch_size, batches).dataset, train(batch_size, 1).dataset
        return of("lightning.pytorch:LightningDataModule").from_datasets(*sets, batch_size=batch_size)

    return Run(lambda: of(f"torchgeo.trainers:{task}")(in_channels=4, weights=None, **options), module)


IMAGE: dict[str, Callable[[int], Any]] = {"image": lambda _: torch.rand(4, 64, 64)}
MASK: dict[str, Callable[[int], Any]] = {"mask": lambda _: torch.randint(5, (64, 64))}
add("torchgeo_segmentation", "torchgeo", (4, 8), lambda: torchgeo("SemanticSegmentationTask", {**IMAGE, **MASK},
    model="unet", backbone="resnet18", num_classes=5, loss="focal"))
add("torchgeo_simclr", "torchgeo", (4, 8), lambda: torchgeo("SimCLRTask", IMAGE, model="resnet18", size=64, layers=2,
    hidden_dim=64, output_dim=32))


def brain(name: str) -> Run:
    build = lambda: of(f"braindecode.models:{name}")(n_chans=22, n_outputs=10, n_times=500)  # noqa: E731
    return Run(classifier(build), data(lambda i: (torch.randn(22, 500), i % 10)))


add("braindecode_eegnet", "braindecode", (4, 16), lambda: brain("EEGNet"))
add("braindecode_conformer", "braindecode", (4, 16), lambda: brain("EEGConformer"))

# Tables --------------------------------------------------------------------------------------------------------------

TABULAR: dict[str, tuple[str, dict[str, Any]]] = {"tabnet": ("TabNetModelConfig", {"n_steps": 2}),
    "node": ("NodeConfig", {"num_trees": 64, "num_layers": 1, "depth": 4}),
    "auto_int": ("AutoIntConfig", {"num_heads": 2, "num_attn_blocks": 2})}
for name, (config, options) in TABULAR.items():
    add(f"pytorch_tabular_{name}", "pytorch-tabular", (64, 256), lambda c=config, o=options: tabular(c, **o))


def deep_gp() -> Run:
    """Two layers of Gaussian processes, sampled."""
    import gpytorch
    from gpytorch.models.deep_gps import DeepGP, DeepGPLayer

    class Layer(DeepGPLayer):
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

    class Deep(DeepGP):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.last = Layer(4, 3), Layer(3, None)
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

        def forward(self, x: Any) -> Any:
            return self.last(self.hidden(x))

    def build() -> Step:
        network = Deep()
        bound = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(network.likelihood, network, 1000))
        return Step(network, lambda n, b: -bound(n(b[0]), b[1]))

    return Run(build, data(lambda _: (torch.randn(4), torch.randn(()))))


add("gpytorch_deep_gp", "gpytorch", (32, 128), deep_gp)
