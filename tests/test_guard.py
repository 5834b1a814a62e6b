"""The guard of a training loop and the callbacks: what they predict and say, and that training is as without them."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import memsize

ALLOCATED, RESERVED = "allocated_bytes.all.peak", "reserved_bytes.all.peak"
"""As `torch.cuda.memory_stats` names them."""


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 16))


BATCH = torch.randn(8, 256)


def test_it_predicts_what_a_trace_of_the_same_optimizer_does() -> None:
    model = net()
    guard = memsize.guard(model, torch.optim.AdamW(model.parameters(), lr=0.1), BATCH)
    expected = memsize.trace(net(), input_data=BATCH, optimizer="adamw").peak
    assert guard.predicted == {ALLOCATED: expected.allocated, RESERVED: expected.reserved}
    assert (guard.budget, guard.fits, guard.measured()) == (None, None, None) or torch.cuda.is_available()


def test_it_takes_the_parameters_that_the_optimizer_has() -> None:
    """SGD with momentum has one state of its parameters' size; that of the first layer has none."""
    model = net()
    groups = [{"params": model[2].parameters(), "lr": torch.tensor(0.1)}]
    guard = memsize.guard(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9), BATCH)
    states = [each for each in guard.step.trace.storages if each.role == "optimizer state"]
    assert sum(each.bytes for each in states) == 4 * (1024 * 16 + 16)


def test_inference_without_an_optimizer() -> None:
    guard = memsize.guard(net(), None, BATCH, budget="1 GiB")
    assert guard.fits is True
    assert "gradient" not in guard.step.peak.roles


def test_it_warns_or_stops_where_the_memory_is_not_there() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.warns(
        UserWarning, match=r"Sequential needs .* at its peak, in .*; 1\.00 MiB are available\. The largest part is"
    ):
        memsize.guard(model, optimizer, BATCH, budget="1 MiB")
    with pytest.raises(memsize.BudgetError, match=r"1\.00 MiB are available"):
        memsize.guard(model, optimizer, BATCH, budget=1 << 20, on_excess="raise")
    assert memsize.guard(model, optimizer, BATCH, budget=1 << 20, on_excess="ignore").fits is False


def test_it_leaves_model_optimizer_and_randomness_alone() -> None:
    def trained(guarded: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(net(), nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters())
        if guarded:
            memsize.guard(model, optimizer, BATCH)
            assert not optimizer.state and all(p.grad is None for p in model.parameters())
        for _ in range(2):
            model(BATCH).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters()), torch.random.get_rng_state()

    (left, state), (right, expected) = trained(True), trained(False)
    assert all(map(torch.equal, left, right)) and torch.equal(state, expected)


def test_an_optimizer_that_cannot_be_made_again_is_told() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, parameters: Any, closure: Any) -> None:
            super().__init__(parameters, lr=0.1)

    model = net()
    with pytest.raises(memsize.InputError, match="the optimizer 'Odd' cannot be made"):
        memsize.guard(model, Odd(model.parameters(), None), BATCH)


# -- the Trainer of transformers --------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Sixteen texts; reading one draws a random number, as augmentation does."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = (torch.arange(32) * (index + 1) + torch.randint(2, ())) % 100
        return {"input_ids": ids, "labels": ids}


def with_trainer(folder: Any, callbacks: list[Any], data: Any = None) -> list[torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of transformers and accelerate
        transformers.Trainer(model, args, train_dataset=data or Samples(), callbacks=callbacks).train()
    return [parameter.detach().clone() for parameter in model.parameters()]


needs_accelerate = pytest.mark.skipif(
    not importlib.util.find_spec("accelerate"), reason="the Trainer of transformers needs accelerate"
)


@needs_accelerate
def test_the_trainer_of_transformers(tmp_path: Any) -> None:
    from memsize.hf import MemoryCheck

    check = MemoryCheck()
    guarded = with_trainer(tmp_path, [check])
    assert all(map(torch.equal, guarded, with_trainer(tmp_path, [])))
    assert check.guard is not None
    trace = check.guard.step.trace
    assert [(each.name, each.spec.shape) for each in trace.inputs] == [("input_ids", (4, 32)), ("labels", (4, 32))]
    assert check.guard.step.peak.roles["optimizer state"] > 0
    with pytest.raises(memsize.BudgetError):
        with_trainer(tmp_path, [MemoryCheck(budget="1 MiB", on_excess="raise")])


@needs_accelerate
def test_a_stream_needs_a_batch(tmp_path: Any) -> None:
    from memsize.hf import MemoryCheck

    class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Any:
            return iter([Samples()[index] for index in range(16)])

    check = MemoryCheck()
    with_trainer(tmp_path, [check], Stream())
    assert check.guard is None
    check = MemoryCheck(batch={"input_ids": torch.zeros(4, 32, dtype=torch.int64)})
    with_trainer(tmp_path, [check], Stream())
    assert check.guard is not None


# -- Lightning --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="Lightning is not installed")
@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Any) -> None:
    import lightning

    from memsize.lightning import MemoryCheck

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, labels = batch
            loss = nn.functional.cross_entropy(self.net(inputs), labels)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return self.optimizer(self.parameters())

        optimizer: Any = torch.optim.AdamW

    def trained(*callbacks: Any, accumulate: int = 1) -> list[torch.Tensor]:
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(32, 256), torch.randint(16, (32,)))
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=1,
            callbacks=list(callbacks),
            accumulate_grad_batches=accumulate,
            logger=lightning.pytorch.loggers.CSVLogger(tmp_path),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
        return [parameter.detach().clone() for parameter in module.parameters()]

    check = MemoryCheck()
    assert all(map(torch.equal, trained(check), trained()))
    assert check.guard is not None
    assert check.guard.step.peak.roles["optimizer state"] == 2 * 4 * sum(p.numel() for p in net().parameters())
    written = next(tmp_path.rglob("hparams.yaml")).read_text()
    assert f"memsize/predicted/{RESERVED}: {check.guard.predicted[RESERVED]}" in written
    # Of SGD the peak is in backward, where the widest weight's gradient of a second batch is added to the first's.
    Module.optimizer = torch.optim.SGD
    trained(twice := MemoryCheck(), accumulate=2)

    def loop(copy: Any) -> Any:
        optimizer = torch.optim.SGD(copy.parameters())

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            for _ in range(2):
                nn.functional.cross_entropy(copy(batch[0]), batch[1]).backward()
            optimizer.step()

        return step

    batch = [torch.randn(8, 256), torch.zeros(8, dtype=torch.int64)]
    expected = memsize.trace(net(), args=(batch,), step=loop).peak
    assert twice.guard is not None
    roles = twice.guard.step.peak.roles
    assert roles["gradient"] == expected.roles["gradient"]
    assert roles["temporary"] - expected.roles["temporary"] in range(64)  # what self.log keeps of the batch
    assert expected.roles["temporary"] >= 4 * 1024 * 256
    with pytest.raises(memsize.BudgetError):
        trained(MemoryCheck(budget="1 MiB", on_excess="raise"))
