"""Names whose feature is absent can be imported and asked isinstance of; they say so when they are used."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil

import pytest
import torch

import vllm
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.utils import encode_image_url, fetch_audio, fetch_image, fetch_video
from vllm.sequence import IntermediateTensors, Logprob
from vllm.tokenizers.mistral import MistralTokenizer
from vllm.upstream.refusals import Unserved
from vllm.upstream.table import table
from vllm.usage.usage_lib import UsageContext, is_usage_stats_enabled


@pytest.mark.parametrize(
    "use",
    [
        lambda: MistralTokenizer.from_pretrained("mistralai/x"),
        lambda: MULTIMODAL_REGISTRY.create_processor(None),
        lambda: fetch_audio("file:///a.wav"),
        lambda: fetch_video("file:///a.mp4"),
    ],
)
def test_they_say_so_when_used(use):
    with pytest.raises(NotImplementedError) as caught:
        use()
    assert len(str(caught.value)) > 40


def test_media():
    assert not MULTIMODAL_REGISTRY.supports_multimodal_inputs(None)
    assert PlaceholderRange(offset=2, length=3).get_num_embeds() == 3
    image = pytest.importorskip("PIL.Image")
    url = encode_image_url(image.new("RGB", (1, 1), "red"))
    assert url.startswith("data:image/png;base64,iVBOR")
    assert fetch_image(url).getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(ValueError, match="allowed-local-media-path"):
        fetch_image("file:///a.png")
    assert fetch_image(url, {}).size == fetch_image(url).size
    with pytest.raises(ValueError, match="image_io_kwargs: pictures are read as they are"):
        fetch_image(url, {"rgba_background_color": (0, 0, 0)})
    with pytest.raises(ValueError, match="media_io_kwargs has num_frames and fps of video"):
        MediaConnector({"image": {"size": 3}})
    with pytest.raises(ValueError, match="connection: pictures are fetched"):
        MediaConnector(connection=object())


def test_usage_is_not_told():
    assert UsageContext("LLM_CLASS") is UsageContext.LLM_CLASS
    assert is_usage_stats_enabled() is False


def test_older_paths_of_readings():
    from vllm.logprobs import Logprob as Same

    assert Logprob is Same
    tensors = IntermediateTensors({"hidden": None})  # type: ignore[dict-item]
    assert len(tensors) == 1 and list(tensors.items()) == [("hidden", None)]


def unserved_classes() -> list[type[Unserved]]:
    for each in pkgutil.walk_packages(vllm.__path__, "vllm."):
        if "Unserved" in (each.module_finder.find_spec(each.name, None).loader.get_source(each.name) or ""):  # type: ignore
            importlib.import_module(each.name)
    found, waiting = [], [Unserved]
    while waiting:
        new = [each for each in waiting.pop().__subclasses__() if each.__module__.startswith("vllm.")]
        found += new
        waiting += new
    return found


def test_every_unserved_class_says_what_to_do_instead():
    rows = [(module, name, row) for module, rows in table().names.items() for name, row in rows.items()]
    listed = [
        getattr(importlib.import_module(module), name)
        for module, name, row in rows
        if row.status == "refused" and row.place is None and not row.is_function and "." not in name
    ]
    named = [*unserved_classes(), *listed]
    classes = {found for found in named if isinstance(found, type) and issubclass(found, Unserved)}
    assert len(classes) > 100
    for each in classes:
        with pytest.raises(NotImplementedError, match=f"{each.__name__}: ") as caught:
            each(1, name=2)
        assert len(str(caught.value)) > 40 and each.__doc__


def test_resolvers_of_adapters_are_kept():
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    class Nowhere(LoRAResolver):
        async def resolve_lora(self, base_model_name, lora_name):
            return None

    resolver = Nowhere()
    LoRAResolverRegistry.register_resolver("nowhere", resolver)
    assert "nowhere" in LoRAResolverRegistry.get_supported_resolvers()
    assert asyncio.run(LoRAResolverRegistry.get_resolver("nowhere").resolve_lora("a", "b")) is None
    with pytest.raises(KeyError, match="LoRA resolver 'there' not found"):
        LoRAResolverRegistry.get_resolver("there")


def test_an_operation_of_a_caller_runs_its_native_form():
    from vllm.model_executor.custom_op import CustomOp

    @CustomOp.register("twice_in_a_test")
    class Twice(CustomOp):
        def forward_native(self, x):
            return 2 * x

    assert Twice.name == "twice_in_a_test" and Twice.enabled()
    assert Twice()(torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(ValueError, match="already"):
        CustomOp.register("twice_in_a_test")(Twice)
