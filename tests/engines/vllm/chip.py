"""What vLLM is told where the probe finds a chip with device tensors; no engine is started. Prints one JSON line."""

from __future__ import annotations

import json
from importlib import import_module

from tests.engines.tiny_models import model_path


def main() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    options = {"dtype": "float16", "skip_tokenizer_init": True, "max_model_len": 1024}
    config = EngineArgs(model=str(model_path("qwen3_moe")), **options).create_engine_config()
    worker = import_module(config.parallel_config.worker_cls.rpartition(".")[0])
    answer = {
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
        "device_type": current_platform.device_type,
        "dispatch_key": current_platform.dispatch_key,
        "dist_backend": current_platform.dist_backend,
        "is_cuda": current_platform.is_cuda(),
        "device": str(config.device_config.device_type),
        "worker": config.parallel_config.worker_cls,
        "worker_bases": [base.__name__ for base in worker.ChipWorker.__bases__],
        "communicator": current_platform.get_device_communicator_cls(),
        "eager": config.compilation_config.cudagraph_mode.name == "NONE",
    }
    print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
