"""Mount everything into the installed vLLM in this process and print what the ledger says."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

from baige_device.engines.vllm.activate import mount
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.settings import load_settings


def main() -> None:
    mount()
    from baige_device.activation import activate
    from baige_device.engines.vllm.cuda_hisparse import mount_swap
    from baige_device.engines.vllm.cuda_host_pool import mount_host_pool
    from baige_device.engines.vllm.cuda_indexer import mount_index
    from baige_device.engines.vllm.cuda_mirror import mount_mirror
    from baige_device.engines.vllm.cuda_options import mount_options
    from baige_device.engines.vllm.mount_platform import mount_features

    ops = activate(load_settings()).ops
    before = LEDGER.states()
    features = tuple(dict.fromkeys(row.feature for row in LEDGER.rows))
    for _ in range(2):  # the second time must change nothing
        mount_features(features)
        mount_options()
        for mount_cuda in (mount_swap, mount_mirror, mount_host_pool, mount_index):
            mount_cuda(SimpleNamespace(ops=ops))
    LEDGER.verify_applied(features)
    answer = {"states": [dataclasses.asdict(state) for state in before], "applied": sorted(LEDGER.applied)}
    print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
