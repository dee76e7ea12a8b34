"""Training that shards the model, or wraps it, is refused by name, with the reason."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from opake_lightning.errors import PrivacyError
from opake_lightning.trainer._refusals import check_module, check_trainer
from tests.trainer.helpers import Net, make_loader, make_trainer


class FSDP(FSDPStrategy):
    """The subclass gets past Lightning's own check for a GPU."""


class DeepSpeedStrategy(DDPStrategy):
    """Stands in for the one of that name, whose package need not be there."""


SHARDED = {
    "fsdp": (FSDP, "part of every layer.*backward pass, before anything could clip"),
    "model_parallel": (ModelParallelStrategy, "FSDP2 a parameter is a DTensor.*spread over ranks"),
    "deepspeed": (DeepSpeedStrategy, "Its engine owns backward pass"),
}


@pytest.mark.parametrize("which", SHARDED)
def test_sharding_strategies_are_refused_with_their_reason(tmp_path, which):
    kind, reason = SHARDED[which]
    trainer = make_trainer(tmp_path, strategy=kind())
    told = rf"strategy {kind.__name__} .*raw gradients.*{reason}.*OpakeDDP\(\)"
    with pytest.raises(PrivacyError, match=told):
        check_trainer(trainer)
    with pytest.raises(PrivacyError, match=told):
        trainer.fit(Net(), make_loader())


def test_data_parallel_layers_are_refused():
    net = Net()
    net.net[0] = DataParallel(net.net[0])
    with pytest.raises(PrivacyError, match=r"net\.0 is wrapped in DataParallel"):
        check_module(net)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.dist
def test_wrapped_and_sharded_layers_are_refused(group):
    net = Net()
    net.net[0] = DistributedDataParallel(net.net[0])
    with pytest.raises(PrivacyError, match=r"net\.0 is wrapped in DistributedDataParallel"):
        check_module(net)
    net = Net()
    fully_shard(net.net[0], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(PrivacyError, match=r"parameter net\.0\.weight is a DTensor"):
        check_module(net)


def test_plain_layers_are_not():
    check_module(Net())
