"""Only a client with a key, and no web page, can let nodes load adapters."""

import pytest

from baton.protocol.config import ClusterConfig, ModelConfig, RouterConfig
from tests.support.http_bench import served

PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
ALLOWED = ModelConfig(allow_runtime_lora_updating=True)
BODY: dict[str, object] = {"lora_name": "mine"}


@pytest.mark.parametrize("path", PATHS)
@served(config=ClusterConfig(model=ALLOWED, router=RouterConfig(api_keys=("sesame",))))
async def test_a_key_is_wanted_where_there_are_keys(bench, path):
    assert (await bench.post(BODY, path)).status == 401
    key = {"Authorization": "Bearer sesame"}
    assert (await bench.post({}, path, **key)).status == 400
    assert (await bench.post({**BODY, "lora_int_id": "x"}, path, **key)).status == 400
    assert (
        await bench.post(BODY, path, **key, Origin="https://a.example")
    ).status == 403
    if path == PATHS[0]:
        wide = BODY | {"lora_path": "/a", "is_3d_lora_weight": True}
        reply = await bench.post(wide, path, **key)
        assert reply.status == 400
        assert reply.json["error"]["param"] == "is_3d_lora_weight"
    else:
        reply = await bench.post({"lora_name": "sql"}, path, **key)
        assert reply.status == 400
        assert "which stay loaded" in reply.json["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@served()
async def test_without_the_setting_the_paths_are_unknown(bench, path):
    assert (await bench.post(BODY, path)).status == 404
