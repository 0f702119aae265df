"""Which device an engine gets, and what is said when it is not the one wanted. The GPUs are made up."""

from __future__ import annotations

import pytest
import torch
from models_util import make_random_model

from vllm import EngineArgs, logger
from vllm.loader import resolve_model
from vllm.ops import _dispatch
from vllm.utils import device
from vllm.utils.device import cuda_problem, resolve_device

ARCHS = ["sm_75", "sm_80", "sm_90a", "sm_100", "compute_100"]


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(logger, "_seen", set())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "_GPU_FILES", ())


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch one with CUDA and with GPUs of these capabilities; without any, starting CUDA raises `error`."""

    def make(*capabilities, error=None, archs=ARCHS):
        def init():
            if error:
                raise RuntimeError(error)

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: f"Card {index}")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: archs)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(device, "_GPU_FILES", ("/",))

    return make


def test_a_gpu_is_taken_where_there_is_one(gpus):
    gpus((9, 0))
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"


def test_no_gpu_is_nothing_to_talk_about(monkeypatch, vllm_log):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert resolve_device("auto") == "cpu"
    assert not vllm_log.records


@pytest.mark.parametrize("name", ["gpu", "", "CUDA", None, "cuda:x"])
def test_other_names(name):
    with pytest.raises(ValueError, match=r"device must be one of auto, cpu, cuda, got "):
        resolve_device(name)


def test_a_number_is_for_the_environment():
    with pytest.raises(ValueError, match=r"got 'cuda:1'; which GPU it is, CUDA_VISIBLE_DEVICES says"):
        EngineArgs(device="cuda:1").create_engine_config()


class TestAGpuThatCannotBeUsed:
    def test_torch_without_cuda(self, gpus, monkeypatch):
        gpus((9, 0))
        monkeypatch.setattr(torch.version, "cuda", None)
        self.check(
            monkeypatch, r"the installed torch \S+ is built for the CPU only: install one that is built for CUDA"
        )
        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert "built for ROCm" in cuda_problem()

    def test_the_driver(self, gpus, monkeypatch):
        gpus(error="The NVIDIA driver on your system is too old (found version 11040).\n Update it.")
        self.check(
            monkeypatch, r"built for CUDA 13\.0, finds none it can use: The NVIDIA driver .*too old.*\. Update it"
        )
        gpus()
        self.check(monkeypatch, "the driver reports no device")

    def test_an_old_one(self, gpus, monkeypatch):
        gpus((7, 0))
        self.check(monkeypatch, r"GPU 0 \(Card 0\) has compute capability 7\.0, and 7\.5 is the least")

    def test_one_that_torch_has_no_code_for(self, gpus, monkeypatch):
        gpus((12, 0), archs=["sm_75", "sm_90a"])
        self.check(monkeypatch, r"compute capability 12\.0, and the installed torch has code for sm_75, sm_90a only")

    @pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
    def test_those_that_can(self, gpus, capability):
        gpus(capability)
        assert cuda_problem() is None

    def test_only_those_that_are_wanted_count(self, gpus):
        gpus((9, 0), (6, 1))
        assert resolve_device("cuda", 1) == "cuda"
        with pytest.raises(ValueError, match=r"GPU 1 \(Card 1\)"):
            resolve_device("cuda", 2)

    def test_one_that_is_hidden(self, gpus, monkeypatch, vllm_log):
        gpus()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        with pytest.raises(ValueError, match="device='cuda', but CUDA_VISIBLE_DEVICES='-1' hides every GPU"):
            resolve_device("cuda")
        assert resolve_device("auto") == "cpu"
        assert not vllm_log.records, "somebody wanted that"

    def check(self, monkeypatch, message):
        """An error if it was asked for, else one line and the CPU."""
        said = []
        monkeypatch.setattr(device.logger, "warning", lambda text, *args: said.append(text % args))
        with pytest.raises(ValueError, match=f"device='cuda', but .*{message}"):
            resolve_device("cuda")
        assert [resolve_device("auto"), resolve_device("auto")] == ["cpu", "cpu"]
        assert len(said) == 1 and said[0].startswith("there is a GPU, but the model runs on the CPU: ")


@pytest.fixture(scope="module")
def bfloat16_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    _, model = make_random_model("llama", "small", folder)
    model.bfloat16().save_pretrained(folder)
    return str(folder)


class TestDtype:
    def test_bfloat16_where_the_gpu_has_it(self, gpus, bfloat16_model):
        gpus((8, 0))
        assert resolve_model(bfloat16_model, "auto", "cuda").dtype == "bfloat16"

    def test_float16_where_not(self, gpus, bfloat16_model):
        gpus((7, 5))
        assert resolve_model(bfloat16_model, "auto", "cuda").dtype == "float16"
        assert resolve_model(bfloat16_model, "float32", "cuda").dtype == "float32"
        assert resolve_model(bfloat16_model, "bfloat16", "cpu").dtype == "bfloat16"
        with pytest.raises(ValueError, match=r"dtype='bfloat16' needs a GPU of compute capability 8\.0 or above"):
            resolve_model(bfloat16_model, "bfloat16", "cuda")


def test_without_triton(monkeypatch):
    said = []
    monkeypatch.setattr(_dispatch, "find_spec", lambda name: None)
    monkeypatch.setattr(_dispatch.logger, "warning", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(_dispatch.envs, "ops_reference", lambda: False)
    assert [_dispatch.of_device.__wrapped__("cuda") for _ in range(2)] == ["reference", "reference"]
    assert len(said) == 1 and "Triton is not installed" in said[0]
